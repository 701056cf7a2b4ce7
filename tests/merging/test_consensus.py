"""Consensus merging: what several tasks use."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.consensus import Consensus
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    # tau_m = [3, 10, 0, 2, 0]. Who uses an entry, with lambda = 0.5, |tau| > 0.5 |rest|?
    #   1, 2:  1 > 1 no, 2 > 0.5 yes                 one user
    #   9, 1:  9 > 0.5, 1 > 4.5 no                   one user
    #   4, -4: 4 > 2, 4 > 2                          two users, but nothing in sum
    #   1, 1:  1 > 0.5, 1 > 0.5                      two users
    #   0, 0                                         none
    vectors = vectors_of([1, 9, 4, 1, 0], [2, 1, -4, 1, 0])
    assert merged(Consensus(0.5, agree=2, scale=1.0), vectors)["w"].tolist() == [0, 0, 0, 2, 0]
    assert merged(Consensus(0.5, agree=1, scale=2.0), vectors)["w"].tolist() == [6, 20, 0, 4, 0]
    assert merged(Consensus((0.1, 0.5), agree=2, scale=1.0), vectors)["w"].tolist() == [3, 0, 0, 2, 0]


def test_a_threshold_of_zero_keeps_every_entry_that_is_used(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    expected = sum((vector["m"] for vector in vectors.vectors.values()), torch.zeros(()))
    assert torch.equal(merged(Consensus(0.0, agree=3, scale=1.0), vectors)["m"], expected)


def test_against_the_formula(random_vectors: Make, merged: Merge, stacked: Merge) -> None:
    vectors = random_vectors(experts=4, coarse=True)
    result = merged(Consensus(0.4, agree=2), vectors)
    for key, deltas in stacked(vectors).items():
        uses = deltas.abs() > 0.4 * (deltas.sum(0) - deltas).abs()
        torch.testing.assert_close(result[key], 0.3 * deltas.sum(0) * (uses.sum(0) >= 2))


def test_more_agreement_than_experts_is_refused(vectors_of: Make, merged: Merge) -> None:
    with pytest.raises(RecipeError, match=r"'agree' is 3, but there are 2 experts: .* set it to at most 2"):
        merged(Consensus(agree=3), vectors_of([1.0], [2.0]))


def test_agreement_of_nobody_is_refused() -> None:
    with pytest.raises(RecipeError, match="'agree' must be at least 1, got 0"):
        Consensus(agree=0)
