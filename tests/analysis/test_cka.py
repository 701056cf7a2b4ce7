"""CKA: invariant to rotation, shift and scale; by hand; unbiased; and of updates, which KnOTS cannot change."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.lora_cka import update_cka

from orthomerge.analysis.layers import linear_cka
from orthomerge.core.errors import IncompatibleError
from orthomerge.testing.toys import random, rotation


@pytest.mark.parametrize("shape", [(60, 8), (10, 40)])
def test_rotation_shift_and_scale_change_nothing(shape: tuple[int, int]) -> None:
    X, Y = random(*shape, seed=1), random(shape[0], 5, seed=2)
    turned = 0.01 * X @ rotation(shape[1]).T + 5 * random(shape[1], seed=3)
    assert linear_cka(X, turned) == pytest.approx(1, abs=1e-5)
    assert linear_cka(turned, Y) == pytest.approx(linear_cka(X, Y), abs=1e-5)
    assert linear_cka(X, Y) == pytest.approx(linear_cka(Y, X))


def test_a_general_linear_map_is_seen() -> None:
    X = random(200, 6)
    assert linear_cka(X, X @ torch.diag(torch.tensor([10.0, 1, 1, 1, 1, 1]))) < 0.9


def test_unbiased_by_the_sum_over_four_inputs() -> None:
    """HSIC_1 is the mean over all quadruples of different inputs (Song et al. 2012, Eq. 3)."""
    from itertools import permutations

    X, Y = random(6, 3, seed=1).double(), random(6, 2, seed=2).double()

    def hsic(A: torch.Tensor, B: torch.Tensor) -> float:
        K, L = A @ A.T, B @ B.T
        every = list(permutations(range(6), 4))
        return sum(float(K[i, j] * (L[i, j] + L[q, r] - 2 * L[i, q])) for i, j, q, r in every) / len(every)

    assert linear_cka(X, Y) == pytest.approx(hsic(X, Y) / math.sqrt(hsic(X, X) * hsic(Y, Y)))


def test_strangers_with_few_inputs() -> None:
    X, Y = random(30, 400, seed=1), random(30, 400, seed=2)
    assert abs(linear_cka(X, Y)) < 0.1


def test_constant_features_are_like_nothing() -> None:
    constant = torch.full((8, 3), 0.1) + 1e-8 * random(8, 3)
    assert math.isnan(linear_cka(constant, random(8, 3)))


@pytest.mark.parametrize(("rows", "others"), [(3, 3), (5, 6)])
def test_too_few_inputs_and_other_inputs_are_refused(rows: int, others: int) -> None:
    with pytest.raises(IncompatibleError, match="CKA compares features of the same inputs, at least 4"):
        linear_cka(random(rows, 2), random(others, 2))


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
    expected = linear_cka(X @ one.T, X @ other.T)
    assert update_cka(torch.stack([one, other]), inputs=X) == pytest.approx(expected)
    assert update_cka(torch.stack([one, other])) == pytest.approx(linear_cka(one.T, other.T))


def test_the_joint_basis_changes_no_cka() -> None:
    X = torch.randn(60, 9, generator=torch.Generator().manual_seed(2))
    for inputs in (None, X):
        before = update_cka(updates(), inputs=inputs)
        assert update_cka(updates(), inputs=inputs, view="parts") == pytest.approx(before, abs=1e-5)
        assert abs(update_cka(updates(), inputs=inputs, view="directions") - before) > 1e-3


def test_an_expert_without_an_update_is_left_out() -> None:
    some = updates()
    some[2] = 0
    assert update_cka(some) == pytest.approx(update_cka(some[:2]))
    assert math.isnan(update_cka(torch.zeros(3, 12, 9)))
