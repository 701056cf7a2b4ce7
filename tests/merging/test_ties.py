"""TIES of the paper: by hand, and against a naive version of the whole vector."""

from collections.abc import Callable

import pytest
import torch

from orthomerge.merging.ties import Ties
from orthomerge.merging.vectors import TaskVectors

Merge = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., TaskVectors]
Flat = Callable[[TaskVectors], torch.Tensor]


def test_by_hand(vectors_of: Make, merged: Merge) -> None:
    # The two largest of five stay:  [4, -3, 0, 0, 0]  [-5, 0, 3, 0, 0]  [0, -9, 7, 0, 0]
    vectors = vectors_of([4, -3, 1, 0, 2], [-5, 1, 3, 0, -0.5], [-1, -9, 7, 0, 0])
    # Sums -1, -12, 10: the four loses against the five.
    assert merged(Ties(0.4, scale=2.0), vectors)["w"].tolist() == [-10, -12, 10, 0, 0]


def test_the_trim_is_over_the_whole_vector(vectors_of: Make, merged: Merge) -> None:
    vectors = vectors_of({"large": [5.0, -4.0], "small": [1.0, 2.0]})
    result = merged(Ties(0.5), vectors)
    assert result["large"].tolist() == [5, -4]
    assert result["small"].tolist() == [0, 0]


def test_ties_at_the_threshold_all_survive(vectors_of: Make, merged: Merge) -> None:
    assert merged(Ties(0.25), vectors_of([1, -1, 1, 0.5]))["w"].tolist() == [1, -1, 1, 0]


def test_entries_that_cancel_elect_plus(vectors_of: Make, merged: Merge) -> None:
    assert merged(Ties(1.0), vectors_of([2, -3], [-2, 3]))["w"].tolist() == [2, 3]


def test_a_density_below_one_entry_keeps_nothing(vectors_of: Make, merged: Merge) -> None:
    assert merged(Ties(0.3), vectors_of([2, -3, 1]))["w"].tolist() == [0, 0, 0]


def test_no_look_is_taken_at_density_one(vectors_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = vectors_of([1.0], [2.0])
    monkeypatch.setattr(TaskVectors, "block", lambda *_: pytest.fail("was read"))
    Ties(1.0).survey(vectors)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.2, 0.77])
def test_against_the_whole_vector(
    density: float, coarse: bool, random_vectors: Make, merged: Merge, flat: Flat
) -> None:
    vectors = random_vectors(coarse=coarse, experts=4)
    long = flat(vectors)
    k = int(density * long.shape[1])
    limits = long.abs().sort(dim=1, descending=True).values[:, k - 1 : k]
    kept = torch.where(long.abs() >= limits, long, 0)
    agree = kept.sign() == torch.where(kept.sum(0) >= 0, 1, -1)
    expected = (kept * agree).sum(0) / agree.sum(0).clamp(min=1)
    result = torch.cat([delta.flatten() for delta in merged(Ties(density), vectors).values()])
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
