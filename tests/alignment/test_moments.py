"""Moments are sums: those of folds add up to those of all inputs, and centred ones are those of centred rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.alignment.planted import doubles
from tests.alignment.toys import head_of, pair_of

from orthomerge.alignment.moments import Moments
from orthomerge.alignment.problem import FOLDS, Problem

NAMES = ("sum_h", "sum_t", "C", "S")


def same(one: Moments, other: Moments, *, size: Moments | None = None) -> None:
    """Equal to 1e-10 of `size`: of what was summed, where something as large was taken off again."""
    assert one.n == other.n
    for name in NAMES:
        ours, theirs = getattr(one, name), getattr(other, name)
        most = float(torch.linalg.vector_norm(getattr(size or other, name)))
        assert ours.dtype == torch.float64
        assert torch.linalg.vector_norm(ours - theirs) <= 1e-10 * max(1.0, most)


def test_by_hand() -> None:
    H, T = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0], [2.0, 0.0]])
    found = Moments.of(H, T)
    assert (found.n, found.d) == (3, 2)
    assert found.sum_h.tolist() == [9, 15]
    assert found.sum_t.tolist() == [3, 3]
    assert found.C.tolist() == [[35, 59], [59, 101]]
    assert found.S.tolist() == [[11, 20], [7, 10]]
    assert found.mean_h.tolist() == [3, 5]
    assert found.mean_t.tolist() == [1, 1]
    centred = found.centred()
    assert centred.C.tolist() == [[8, 14], [14, 26]]
    assert centred.S.tolist() == [[2, 5], [-2, -5]]
    assert (centred.sum_h.tolist(), centred.sum_t.tolist()) == ([0, 0], [0, 0])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), mean=st.sampled_from([0.0, 5.0, 100.0]), n=st.integers(1, 40))
def test_centred_moments_are_those_of_centred_rows(seed: int, mean: float, n: int) -> None:
    H, T = doubles(n, 4, seed=seed) + mean, doubles(n, 4, seed=seed + 1) + mean
    found = Moments.of(H, T)
    same(found.centred(), Moments.of(H - H.mean(0), T - T.mean(0)), size=found)


@pytest.mark.parametrize("count", [1, 3, 5, 13, 40])
def test_folds_add_up_to_all_inputs(count: int) -> None:
    problem = Problem.of(pair_of(doubles(count, 6) + 2, doubles(count, 6, seed=1)), head_of("plain"))
    assert len(problem.folds) == min(count, FOLDS)
    same(Moments.total(problem.folds), problem.moments)
    for number, part in enumerate(problem.folds):
        mine = torch.arange(count) % FOLDS == number
        same(part, Moments.of(problem.H[mine], problem.T[mine]))


def test_moments_through_some_directions_are_those_of_the_rows_there() -> None:
    H, T, Q = doubles(30, 8) + 10, doubles(30, 8, seed=1) - 10, torch.linalg.qr(doubles(8, 3, seed=2))[0]
    same(Moments.of(H, T).through(Q), Moments.of(H @ Q, T @ Q), size=Moments.of(H, T))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_are_summed_in_float64(dtype: torch.dtype) -> None:
    H, T = doubles(300, 5).to(dtype), doubles(300, 5, seed=1).to(dtype)
    same(Moments.of(H, T), Moments.of(H.double(), T.double()))
    # In float16 itself this sum would be infinite, and in float32 no longer grow.
    big = torch.full((4, 1), 60_000.0, dtype=torch.float16)
    assert Moments.of(big, big).C.item() == 4 * float(big[0]) ** 2
