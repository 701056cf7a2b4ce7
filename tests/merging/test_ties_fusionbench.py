"""FusionBench's TIES: by hand, and against its steps spelled out naively."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from orthomerge.errors import RecipeError
from orthomerge.merging.ties_fusionbench import TiesFusionBench
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]
Flat = Callable[[TaskVectors], torch.Tensor]
Kind = Literal["sum", "mean", "max"]


def test_one_entry_more_than_the_paper_survives(vectors_of: Make, merged: Merge) -> None:
    result = merged(TiesFusionBench(0.4, scale=1.0), vectors_of([5, -4, 3, 2, 1]))["w"]
    assert result.tolist() == [5, -4, 3, 0, 0]


@pytest.mark.parametrize(("kind", "expected"), [("sum", [-6, -3, 4]), ("mean", [-3, -3, 2]), ("max", [-4, -3, 3])])
def test_by_hand(kind: Kind, expected: list[float], vectors_of: Make, merged: Merge) -> None:
    # Sums -6, 0, 4, 0 ... with three minus and one plus elsewhere: the draw goes to minus.
    vectors = vectors_of({"w": [-2, 3, 1], "v": [-1, -1]}, {"w": [-4, -3, 3], "v": [-1, 0]})
    assert merged(TiesFusionBench(1.0, scale=1.0, merge=kind), vectors)["w"].tolist() == expected


@pytest.mark.parametrize(("kind", "expected"), [("sum", -3), ("mean", -3), ("max", 0)])
def test_when_the_majority_is_a_draw_too(kind: Kind, expected: float, vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of([3, 1, -1], [-3, 1, -1])
    assert merged(TiesFusionBench(1.0, scale=1.0, merge=kind), vectors)["w"][0] == expected


def _naive(flat: torch.Tensor, density: float, kind: Kind) -> torch.Tensor:
    d = flat.shape[1]
    limit = flat.abs().kthvalue(d - int(d * density), dim=1, keepdim=True).values
    kept = flat * (flat.abs() >= limit)
    sign = kept.sum(0).sign()
    sign[sign == 0] = sign.sum().sign()
    chosen = kept * torch.where(sign > 0, kept > 0, kept < 0)
    if kind == "sum":
        return chosen.sum(0)
    if kind == "mean":
        return chosen.sum(0) / (chosen != 0).sum(0).clamp(min=1)
    return chosen.abs().max(0).values * sign


@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("density", [0.2, 0.9])
def test_against_its_steps(
    kind: Kind, coarse: bool, density: float, random_vectors: Make, merged: Merge, flat: Flat
) -> None:
    vectors = random_vectors(coarse=coarse)
    long = flat(vectors)
    parts = merged(TiesFusionBench(density, merge=kind), vectors).values()
    result = torch.cat([delta.flatten() for delta in parts])
    torch.testing.assert_close(result, 0.3 * _naive(long, density, kind), rtol=1e-6, atol=1e-9)


def test_an_unknown_merge_is_refused() -> None:
    wrong: Any = "means"
    with pytest.raises(RecipeError, match="'merge' must be sum, mean or max, got 'means'; did you mean 'mean'"):
        TiesFusionBench(merge=wrong)
