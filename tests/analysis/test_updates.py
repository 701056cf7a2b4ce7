"""CKA of updates: what KnOTS cannot change, what it can, and experts that do nothing."""

from __future__ import annotations

import math

import pytest
import torch

from orthomerge.analysis.cka import linear_cka
from orthomerge.analysis.updates import update_cka, update_figure
from orthomerge.core.errors import RecipeError


def updates(experts: int = 3, rank: int = 2, *, shared: float = 0.0) -> torch.Tensor:
    """Random updates of low rank [T, 12, 9], a part of which all experts have."""
    generator = torch.Generator().manual_seed(0)

    def product() -> torch.Tensor:
        return torch.randn(12, rank, generator=generator) @ torch.randn(rank, 9, generator=generator)

    common = product()
    return torch.stack([shared * common + product() for _ in range(experts)])


def test_two_experts_by_hand() -> None:
    one, other = updates(2)
    X = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    expected = linear_cka(X @ one.T, X @ other.T, unbiased=True)
    assert update_cka(torch.stack([one, other]), inputs=X) == pytest.approx(expected)
    assert update_cka(torch.stack([one, other])) == pytest.approx(linear_cka(one.T, other.T, unbiased=True))


def test_the_joint_basis_changes_no_cka() -> None:
    X = torch.randn(60, 9, generator=torch.Generator().manual_seed(2))
    for inputs in (None, X):
        before = update_cka(updates(), inputs=inputs)
        assert update_cka(updates(), inputs=inputs, view="parts") == pytest.approx(before, abs=1e-5)
        assert abs(update_cka(updates(), inputs=inputs, view="directions") - before) > 1e-3


def test_what_experts_share_shows() -> None:
    alone, alike = update_cka(updates()), update_cka(updates(shared=5.0))
    assert alone < 0.5 < 0.9 < alike
    same = updates(1).expand(3, -1, -1)
    assert update_cka(same) == pytest.approx(1)


def test_an_expert_without_an_update_is_left_out() -> None:
    some = updates()
    some[2] = 0
    assert update_cka(some) == pytest.approx(update_cka(some[:2]))
    assert math.isnan(update_cka(torch.zeros(3, 12, 9)))
    with pytest.raises(RecipeError, match=r"at least two experts, got \(1, 12, 9\)"):
        update_cka(updates(1))


def test_figure() -> None:
    heat = update_figure({"full": {"a": 0.9, "b": 0.8}, "LoRA": {"a": 0.3}}, inputs=64)
    assert (heat.rows, heat.columns) == (("a", "b"), ("full", "LoRA"))
    assert heat.values[0] == (0.9, 0.3)
    assert math.isnan(heat.values[1][1])
