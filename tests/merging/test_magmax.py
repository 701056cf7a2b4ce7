"""MagMax: the largest entry, and the later expert among equals."""

from collections.abc import Callable

import torch

from orthomerge.merging.magmax import MagMax
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([1, -5, 2, 0, 3], [-2, 4, -2, 0, -3], [0, 1, 1, 0, 3])
    assert merged(MagMax(0.5), vectors)["w"].tolist() == [-1, -2.5, -1, 0, 1.5]


def test_idempotent(random_vectors: Make, merged: Merge, vectors_of: Make) -> None:
    once = merged(MagMax(1.0), random_vectors())["m"]
    assert torch.equal(merged(MagMax(1.0), vectors_of(once, once))["w"], once)


def test_the_order_matters_only_among_equals(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    swapped = TaskVectors(dict(reversed(list(vectors.vectors.items()))))
    assert torch.equal(merged(MagMax(), vectors)["m"], merged(MagMax(), swapped)["m"])


def test_against_argmax(random_vectors: Make, merged: Merge, stacked: Merge) -> None:
    vectors = random_vectors(coarse=True, experts=5)
    result = merged(MagMax(1.0), vectors)
    for key, deltas in stacked(vectors).items():
        latest = deltas.flip(0)  # argmax takes the first among equals
        if deltas[0].numel():
            assert torch.equal(result[key], latest.gather(0, latest.abs().argmax(0, keepdim=True))[0])
