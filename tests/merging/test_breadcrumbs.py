"""Breadcrumbs: by hand, and against mergekit's sort spelled out naively."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.merging.breadcrumbs import Breadcrumbs
from orthomerge.merging.ties import ties_per_tensor
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]

TEN = [1, -2, 3, -4, 5, -6, 7, -8, 9, -10]


@pytest.mark.parametrize(
    ("density", "gamma", "expected"),
    [
        (0.5, 0.2, [0, 0, 0, -4, 5, -6, 7, -8, 0, 0]),
        (0.5, 0.0, [0, 0, 0, 0, 0, -6, 7, -8, 9, -10]),
        (0.9, 0.3, [1, -2, 3, -4, 5, -6, 7, -8, 9, 0]),  # they do not both fit: fewer outliers go
        (1.0, 0.3, TEN),
        (0.05, 0.1, [0] * 10),
    ],
)
def test_by_hand(density: float, gamma: float, expected: list[float], vectors_of: Make, merged: Merge) -> None:
    assert merged(Breadcrumbs(density, gamma, 1.0), vectors_of(TEN))["w"].tolist() == expected


def test_equal_entries_stay_together(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([3, 3, -3, 1, 1, 1, 1, 1, 0, 9])
    assert merged(Breadcrumbs(0.4, 0.2, 1.0), vectors)["w"].tolist() == [3, 3, -3, 1, 1, 1, 1, 1, 0, 0]


def test_without_outliers_it_is_a_trim(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of(torch.randn(300, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(merged(Breadcrumbs(0.3, 0.0, 1.0), vectors)["w"], merged(ties_per_tensor(0.3), vectors)["w"])


def _naive(delta: torch.Tensor, density: float, gamma: float) -> torch.Tensor:
    if density >= 1:
        return delta
    n = delta.numel()
    target, top = int(density * n), int(gamma * n)
    bottom = max(0, n - target - top)
    mask = torch.zeros(n)
    mask[delta.abs().flatten().argsort()[bottom : bottom + target]] = 1
    return delta * mask.reshape(delta.shape)


@pytest.mark.parametrize("density", [0.01, 0.5, 0.9, 0.995, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.2])
def test_against_sorting(density: float, gamma: float, random_vectors: Make, merged: Merge, stacked: Merge) -> None:
    vectors = random_vectors()
    result = merged(Breadcrumbs(density, gamma, (0.1, 0.2, 0.3)), vectors)
    for key, deltas in stacked(vectors).items():
        kept = [_naive(delta, density, gamma) * w for delta, w in zip(deltas, (0.1, 0.2, 0.3), strict=True)]
        torch.testing.assert_close(result[key], torch.stack(kept).sum(0), rtol=1e-6, atol=1e-9)
