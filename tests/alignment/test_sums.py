"""Sums in folds are sums: any batches, any workers, any order of them; and they are all that a closed form needs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.alignment.planted import doubles, exact, head_in, same_head, turn
from tests.alignment.toys import HEADS, head_of, pair_of

from orthomerge.alignment.aligner import SumAligner
from orthomerge.alignment.aligners import ALIGNERS, make_aligner
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.sums import FOLDS, Sums, moments_of
from orthomerge.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

CLOSED = [row.name for row in ALIGNERS.values() if row.closed]
FIXED: Mapping[str, Mapping[str, Any]] = {
    "ridge": {"strength": 0.1},
    "orthogonal": {"kappa": 0.1},
    "similarity": {"kappa": 0.1},
    "linear": {"strength": 0.1},
    "invertible": {"strength": 0.1},
    "affine": {"strength": 0.1},
    "logit-procrustes": {"kappa": 0.1},
}


def same(one: Sums, other: Sums) -> None:
    for ours, theirs in zip((*one.parts, one.total), (*other.parts, other.total), strict=True):
        assert ours.n == theirs.n
        for name in ("sum_h", "sum_t", "C", "S", "tt"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-10, atol=1e-10)


def test_a_row_belongs_to_the_fold_of_its_number() -> None:
    H = torch.arange(7.0)[:, None]
    found = Sums.zero(1, "toy").add(H, 10 * H, first=3)
    assert [part.n for part in found.parts] == [1, 1, 1, 2, 2]
    # Numbers 3, 4, 5, 6, 7, 8, 9 are in folds 3, 4, 0, 1, 2, 3, 4.
    assert [part.sum_h.item() for part in found.parts] == [2, 3, 4, 0 + 5, 1 + 6]
    assert [part.S.item() for part in found.parts] == [40, 90, 160, 250, 10 + 360]
    assert (found.n, found.total.sum_t.item()) == (7, 210)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 33), max_size=5),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**31),
)
def test_any_workers_any_batches_any_order(cuts: list[int], batches: list[int], order: Any, seed: int) -> None:
    H, T = doubles(33, 4, seed=seed) + 3, doubles(33, 4, seed=seed + 1)
    workers = []
    for start, end in pairwise(sorted({0, 33, *cuts})):
        mine, place, turn = Sums.zero(4, "toy"), start, 0
        while place < end:
            size = min(batches[turn % len(batches)], end - place)
            mine = mine.add(H[place : place + size], T[place : place + size], first=place)
            place, turn = place + size, turn + 1
        workers.append(mine)
    order.shuffle(workers)
    same(sum(workers, start=Sums.zero(4, "toy")), Sums.zero(4, "toy").add(H, T, first=0))


def test_every_fold_is_held_out_once() -> None:
    H, T = doubles(13, 3), doubles(13, 3, seed=1)
    sums = Sums.zero(3, "toy").add(H, T, first=0)
    splits = list(sums.splits())
    assert len(splits) == FOLDS
    for number, (train, held_out) in enumerate(splits):
        mine = torch.arange(13) % FOLDS == number
        for part, rows in ((train, ~mine), (held_out, mine)):
            expected = Moments.of(H[rows], T[rows])
            assert part.n == expected.n
            torch.testing.assert_close(part.S, expected.S)
            torch.testing.assert_close(part.C, expected.C)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_inputs_have_few_folds(count: int) -> None:
    sums = Sums.zero(2, "toy").add(doubles(count, 2), doubles(count, 2), first=8)
    assert len(list(sums.splits())) == (0 if count == 1 else count)
    assert sums.add(doubles(0, 2), doubles(0, 2), first=9).n == count


@pytest.mark.parametrize(("count", "d"), [(1, 3), (4, 3), (13, 3), (40, 3), (40, 200)])
def test_sums_of_rows_are_those_of_their_folds(count: int, d: int) -> None:
    """To the last bit, whichever is asked for first."""
    H, T = doubles(count, d) + 2, doubles(count, d, seed=1)
    whole, parts = Sums.of(H, T, "toy"), Sums(Sums.of(H, T, "toy").parts, "toy")
    same(whole, Sums.zero(d, "toy").add(H, T, first=0))
    for name in ("n", "sum_h", "sum_t", "C", "S", "tt"):
        one, other = (torch.as_tensor(getattr(each.total, name)) for each in (whole, parts))
        assert torch.equal(one, other)
    same(Sums.of(H, T, "toy") + Sums.zero(d, "toy"), whole)
    assert (whole.n, Sums.of(H, T, "toy").n) == (count, count)
    more = doubles(5, d, seed=2)
    same(whole.add(more, more, first=count), Sums.of(torch.cat([H, more]), torch.cat([T, more]), "toy"))


def test_few_directions_of_rows_are_those_of_their_sums() -> None:
    """To six digits, around a mean that is ten times as large as the rest."""
    H, T, Q = doubles(30, 8) + 10, doubles(30, 8, seed=1) - 10, torch.linalg.qr(doubles(8, 3, seed=2))[0]
    ours, theirs = Sums.of(H, T, "toy"), Sums.zero(8, "toy").add(H, T, first=0)
    for one, other in zip(ours.seen_through(Q).parts, theirs.seen_through(Q).parts, strict=True):
        assert one.n == other.n
        for name in ("sum_h", "sum_t", "C", "S"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=2e-6, atol=2e-4)


def test_rows_that_no_sum_can_hold() -> None:
    rows = doubles(7, 2)
    spoiled = rows.clone()
    spoiled[3, 1] = float("nan")
    for pair in ((rows, spoiled), (spoiled, rows)):
        with pytest.raises(NumericalError, match="is not finite; no sum can hold it"):
            moments_of(pair)
        with pytest.raises(NumericalError, match="is not finite; no sum can hold it"):
            _ = Sums.of(*pair, "toy").total
    with pytest.raises(IncompatibleError, match="a row for each input"):
        moments_of((rows, rows), (rows, rows[:3]))


def test_mistakes() -> None:
    with pytest.raises(RecipeError, match="needs at least one input of 'toy', got 0"):
        _ = Sums.zero(2, "toy").total
    with pytest.raises(IncompatibleError, match="sums of 'toy' and of 'other' cannot be added"):
        _ = Sums.zero(2, "toy") + Sums.zero(2, "other")
    with pytest.raises(IncompatibleError, match="cannot be added to sums over"):
        _ = Sums.zero(2, "toy") + Sums.zero(3, "toy")


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("count", [4, 40])
def test_sums_are_enough(name: str, count: int) -> None:
    """With a strength that is given, in fewer inputs than features and in more."""
    for kind in HEADS:
        _sums_are_enough(name, exact(head_of(kind)), count)


def _sums_are_enough(name: str, head: Head, count: int) -> None:
    expert = doubles(count, 6, seed=1) + 1
    pair = pair_of(0.7 * expert @ turn(6) + 0.3 * doubles(count, 6), expert)
    aligner, problem = cast("SumAligner", make_aligner(name, FIXED.get(name, {}))), Problem.of(pair, head)
    whole = aligner.fit(pair, head)
    parts = [
        Sums.zero(6, "toy").add(problem.H[start:end], problem.T[start:end], first=start)
        for start, end in pairwise((0, 1, count // 2, count))
    ]
    streamed = aligner.solve(sum(reversed(parts), start=Sums.zero(6, "toy")), head)
    for key, tensor in head_in(whole.classifier).tensors().items():
        torch.testing.assert_close(head_in(streamed.classifier).tensors()[key], tensor, rtol=1e-10, atol=1e-10)
    assert streamed.facts.keys() == whole.facts.keys()


def test_what_several_aligners_want_is_made_once() -> None:
    """A rotation for `orthogonal` is one for `similarity` too; sums that were added to start afresh."""
    sums, calls = Sums.zero(2, "toy").add(doubles(9, 2), doubles(9, 2, seed=1), first=0), []

    def make() -> int:
        calls.append(1)
        return len(calls)

    assert [sums.once("one", make), sums.once("one", make), sums.once("two", make)] == [1, 1, 2]
    assert (sums + Sums.zero(2, "toy")).once("one", make) == 3
    head, problem = (
        exact(head_of("plain")),
        Problem.of(pair_of(doubles(40, 6), doubles(40, 6, seed=1)), head_of("plain")),
    )
    for name in CLOSED:
        aligner = cast("SumAligner", make_aligner(name))
        shared, afresh = aligner.solve(problem.sums, head), aligner.solve(Sums(problem.sums.parts, "toy"), head)
        assert same_head(shared.classifier, afresh.classifier)
        assert shared.facts == afresh.facts
