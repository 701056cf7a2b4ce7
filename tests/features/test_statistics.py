"""Sums are sums: any split, any order of workers, any dtype that comes in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orthomerge.errors import IncompatibleError, NumericalError
from orthomerge.features import statistics
from orthomerge.features.statistics import Moments

H = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
T = torch.tensor([[1.0], [0.0], [2.0]])


def same(one: Moments, other: Moments, *, size: Moments | None = None) -> None:
    """Equal to 1e-10 of `size`: of what was summed, where something as large was taken off again."""
    assert one.n == other.n
    for name in ("sum_h", "sum_t", "C", "S", "tt"):
        ours, theirs = getattr(one, name), getattr(other, name)
        most = float(torch.linalg.vector_norm(getattr(size or other, name)))
        assert ours.dtype == torch.float64
        assert torch.linalg.vector_norm(ours - theirs) <= 1e-10 * max(1.0, most)


def test_by_hand() -> None:
    found = Moments.of(H, T)
    assert (found.n, found.d, found.e) == (3, 2, 1)
    assert found.sum_h.tolist() == [9, 15]
    assert found.sum_t.tolist() == [3]
    assert found.C.tolist() == [[35, 59], [59, 101]]
    assert found.S.tolist() == [[11, 20]]
    assert found.tt.item() == 5
    assert found.mean_h.tolist() == [3, 5]
    assert found.mean_t.tolist() == [1]
    centred = found.centred()
    assert centred.C.tolist() == [[8, 14], [14, 26]]
    assert centred.S.tolist() == [[2, 5]]
    assert (centred.tt.item(), centred.sum_h.tolist(), centred.sum_t.tolist()) == (2, [0, 0], [0])


def rows(n: int, d: int, seed: int, *, mean: float = 0.0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + mean


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 50), max_size=6),
    seed=st.integers(0, 2**31),
    mean=st.sampled_from([0.0, 3.0, -100.0]),
    d=st.integers(1, 6),
    e=st.integers(1, 6),
)
def test_any_split_into_workers_and_batches_gives_the_same(
    cuts: list[int], seed: int, mean: float, d: int, e: int
) -> None:
    h, t = rows(50, d, seed, mean=mean), rows(50, e, seed + 1, mean=mean)
    whole = Moments.of(h, t)
    edges = [0, *sorted(cuts), 50]
    spans = list(pairwise(edges))
    workers = [Moments.of(h[start:stop], t[start:stop]) for start, stop in spans]
    batches = Moments.zero(d, e)
    for start, stop in reversed(spans):
        batches = batches.add(h[start:stop], t[start:stop])
    same(sum(workers, start=Moments.zero(d, e)), whole)
    same(batches, whole)
    same(batches.centred(), whole.centred(), size=whole)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), mean=st.sampled_from([0.0, 5.0, 100.0]), n=st.integers(1, 40))
def test_centred_sums_are_those_of_centred_rows(seed: int, mean: float, n: int) -> None:
    h, t = rows(n, 4, seed, mean=mean), rows(n, 3, seed + 1, mean=mean)
    found = Moments.of(h, t)
    same(found.centred(), Moments.of(h - h.mean(0), t - t.mean(0)), size=found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_are_summed_in_float64(dtype: torch.dtype) -> None:
    h, t = rows(300, 5, 0).to(dtype), rows(300, 2, 1).to(dtype)
    same(Moments.of(h, t), Moments.of(h.double(), t.double()))
    # In float16 itself this sum would be infinite, and in float32 no longer grow.
    big = torch.full((4, 1), 60_000.0, dtype=torch.float16)
    assert Moments.of(big, big).C.item() == 4 * float(big[0]) ** 2


def test_long_inputs_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    h, t = rows(50, 3, 0), rows(50, 2, 1)
    whole = Moments.of(h, t)
    monkeypatch.setattr(statistics, "_ROWS", 7)
    same(Moments.of(h, t), whole)


def test_inputs_and_earlier_sums_are_left_alone() -> None:
    first = Moments.of(H, T)
    before = first.C.clone()
    first.add(H, T)
    _ = first + first
    assert torch.equal(first.C, before)
    assert H.dtype == torch.float32
    tracked = H.clone().requires_grad_()
    assert not Moments.of(tracked, T).C.requires_grad


def test_the_gram_of_the_targets_is_a_sum_too() -> None:
    t = rows(20, 3, 0)
    torch.testing.assert_close(Moments.of(t, t).C.trace(), Moments.of(rows(20, 2, 1), t).tt)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_ROWS", 2)
    spoiled = H.clone()
    spoiled[2, 1] = bad
    with pytest.raises(NumericalError, match="row 2 of H is not finite"):
        Moments.of(spoiled, T)
    with pytest.raises(NumericalError, match="row 2 of T is not finite"):
        Moments.zero(2, 2).add(H, spoiled)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Moments.of(H, T[:2]), r"a row for each input, got \(3, 2\) and \(2, 1\)"),
        (lambda: Moments.of(H[0], T), r"a row for each input, got \(2,\) and \(3, 1\)"),
        (lambda: Moments.zero(2, 2).add(H, T), r"must be 2 and 2 wide as those before, got 2 and 1"),
        (lambda: Moments.zero(2, 2) + Moments.zero(2, 1), r"2 and 2 wide cannot be added to sums over 2 and 1"),
    ],
)
def test_shapes_must_fit(act: Any, message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        act()


def test_no_rows_have_no_mean() -> None:
    readers: list[Callable[[Moments], object]] = [lambda m: m.mean_h, lambda m: m.mean_t, lambda m: m.centred()]
    for read in readers:
        with pytest.raises(NumericalError, match="the mean of no rows is not defined"):
            read(Moments.zero(2, 1))
