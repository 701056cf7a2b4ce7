"""DARE before TIES: the trim sees the vectors after the drop."""

from collections.abc import Callable
from math import prod

import pytest
import torch

from orthomerge.merging.dare_ties import DareTies
from orthomerge.merging.kinds import Site
from orthomerge.merging.random import keep_mask
from orthomerge.merging.ties_sum import TiesSum
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]
Flat = Callable[[TaskVectors], torch.Tensor]


def _masks(vectors: TaskVectors, keep: float, seed: int) -> torch.Tensor:
    return torch.stack(
        [
            torch.cat(
                [
                    keep_mask(Site(key, shape, 0, vectors.tasks), task, prod(shape), keep=keep, seed=seed)
                    for key, shape in vectors.shapes.items()
                ]
            )
            for task in vectors.tasks
        ]
    )


@pytest.mark.parametrize("drop", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
def test_against_the_whole_vector(drop: float, density: float, random_vectors: Make, merged: Merge, flat: Flat) -> None:
    vectors = random_vectors()
    long = flat(vectors)
    long = long * _masks(vectors, 1 - drop, 3) / (1 - drop)
    limits = long.abs().sort(dim=1, descending=True).values[:, int(density * long.shape[1]) - 1, None]
    kept = torch.where(long.abs() >= limits, long, 0)
    sign = torch.where(kept.sum(0) >= 0, 1, -1)
    expected = 0.5 * (kept * (kept.sign() == sign)).sum(0)
    parts = merged(DareTies(drop, density, seed=3), vectors).values()
    result = torch.cat([delta.flatten() for delta in parts])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-9)


def test_without_dropping_it_is_ties(random_vectors: Make, merged: Merge) -> None:
    vectors = random_vectors()
    expected = merged(TiesSum(0.3, 0.5), vectors)
    for key, delta in merged(DareTies(0.0, 0.3), vectors).items():
        assert torch.equal(delta, expected[key])
