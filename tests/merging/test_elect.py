"""Trim, elect, merge by hand."""

import torch

from orthomerge.merging.elect import disjoint_max, disjoint_mean, disjoint_sum, elect_sign, total, trim

ROWS = [torch.tensor([1.0, -2.0, 3.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, -5.0, -2.0, 0.0])]
SIGN = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])


def test_trim_keeps_what_is_as_large_as_the_threshold() -> None:
    row = torch.tensor([0.5, -0.5, 0.49999997, 0.0, -3.0])
    assert trim([row], [0.5])[0].tolist() == [0.5, -0.5, 0.0, 0.0, -3.0]


def test_trim_at_the_ends() -> None:
    row = torch.tensor([1e-45, -1.0, 3.4028235e38, 0.0])
    nothing, everything, smallest = trim([row] * 3, [float("inf"), 0.0, float(row[0])])
    assert not nothing.any()
    assert everything is row
    assert torch.equal(smallest, row)


def test_a_sum_of_zero_elects_plus() -> None:
    assert torch.equal(elect_sign(ROWS), SIGN)


def test_disjoint_merges() -> None:
    assert total(ROWS).tolist() == [3.0, -1.0, -2.0, 0.0, 0.0]
    assert disjoint_sum(ROWS, SIGN).tolist() == [3.0, -2.0, -5.0, 2.0, 0.0]
    assert disjoint_mean(ROWS, SIGN).tolist() == [1.5, -2.0, -5.0, 2.0, 0.0]
    assert disjoint_max(ROWS, SIGN).tolist() == [2.0, -2.0, -5.0, 2.0, 0.0]


def test_disjoint_mean_with_factors_and_votes() -> None:
    assert disjoint_mean(ROWS, SIGN, factors=(10.0, 1.0)).tolist() == [6.0, -20.0, -5.0, 20.0, 0.0]
    assert disjoint_mean(ROWS, SIGN, votes=(0.5, 0.25)).tolist() == [4.0, -4.0, -20.0, 4.0, 0.0]
    assert disjoint_mean(ROWS, SIGN, votes=(1.0, -1.0)).tolist() == [3.0, -2.0, 5.0, 2.0, 0.0]  # 1 - 1: left
