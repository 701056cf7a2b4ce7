"""Methods that merge entry by entry, on numbers that are worked out by hand."""

from typing import Any

import pytest
import torch
from tests.merging.making import merged, vectors_of

from orthomerge.merging.angles import ModelStock, Slerp
from orthomerge.merging.elect import disjoint, disjoint_mean, elect_sign, total, trim
from orthomerge.merging.elements import Breadcrumbs, Consensus, MagMax
from orthomerge.merging.ties import Ties, ties, ties_fusionbench, ties_mergekit, ties_peft, ties_per_tensor, ties_sum

# tau_m = [3, 10, 0, 2, 0]. Who uses an entry, with lambda = 0.5, |tau| > 0.5 |rest|?
#   1, 2:  1 > 1 no, 2 > 0.5 yes                 one user
#   9, 1:  9 > 0.5, 1 > 4.5 no                   one user
#   4, -4: 4 > 2, 4 > 2                          two users, but nothing in sum
#   1, 1:  1 > 0.5, 1 > 0.5                      two users
#   0, 0                                         none
USERS = ([1, 9, 4, 1, 0], [2, 1, -4, 1, 0])
TEN = [1, -2, 3, -4, 5, -6, 7, -8, 9, -10]
EQUAL = [3, 3, -3, 1, 1, 1, 1, 1, 0, 9]
# The two largest of five stay: [4, -3, 0, 0, 0] [-5, 0, 3, 0, 0] [0, -9, 7, 0, 0]. Sums -1, -12, 10: the four loses.
THREE = ([4, -3, 1, 0, 2], [-5, 1, 3, 0, -0.5], [-1, -9, 7, 0, 0])
LARGE_AND_SMALL = ({"large": [5, -4], "small": [1, 2]}, {"large": [1, -8], "small": [-1, 4]})
# Sums -6, 0, 4, -2, -1: three minus and one plus, so the zero goes to minus.
MAJORITY = ({"w": [-2, 3, 1], "v": [-1, -1]}, {"w": [-4, -3, 3], "v": [-1, 0]})
DRAW = ([3, 1, -1], [-3, 1, -1])  # as many plus as minus elsewhere
EXACT: list[tuple[Any, tuple[Any, ...], Any]] = [
    (MagMax(0.5), ([1, -5, 2, 0, 3], [-2, 4, -2, 0, -3], [0, 1, 1, 0, 3]), [-1, -2.5, -1, 0, 1.5]),
    (ModelStock(), ([1, 0], [0, 1]), [0, 0]),  # orthogonal: the base
    (ModelStock(), ([1, 0], [-1, 0.5]), [0, 0]),  # opposed
    (ModelStock(), ([1, 0], [0, 0]), [0, 0]),
    (Consensus(0.5, agree=2, scale=1.0), USERS, [0, 0, 0, 2, 0]),
    (Consensus(0.5, agree=1, scale=2.0), USERS, [6, 20, 0, 4, 0]),
    (Consensus((0.1, 0.5), agree=2, scale=1.0), USERS, [3, 0, 0, 2, 0]),
    (Breadcrumbs(0.5, 0.2, 1.0), (TEN,), [0, 0, 0, -4, 5, -6, 7, -8, 0, 0]),
    (Breadcrumbs(0.5, 0.0, 1.0), (TEN,), [0, 0, 0, 0, 0, -6, 7, -8, 9, -10]),
    (Breadcrumbs(0.9, 0.3, 1.0), (TEN,), [1, -2, 3, -4, 5, -6, 7, -8, 9, 0]),  # they do not both fit: fewer outliers go
    (Breadcrumbs(1.0, 0.3, 1.0), (TEN,), TEN),
    (Breadcrumbs(0.05, 0.1, 1.0), (TEN,), [0] * 10),
    (Breadcrumbs(0.4, 0.2, 1.0), (EQUAL,), [3, 3, -3, 1, 1, 1, 1, 1, 0, 0]),  # equal entries stay together
    (Ties(density=0.4, scale=2.0), THREE, [-10, -12, 10, 0, 0]),
    (ties_sum(0.4, scale=0.5), THREE, [-2.5, -6, 5, 0, 0]),
    (ties(0.5), ({"large": [5.0, -4.0], "small": [1.0, 2.0]},), {"large": [5, -4], "small": [0, 0]}),
    (ties_per_tensor(0.5), LARGE_AND_SMALL, {"large": [5, -8], "small": [0, 3]}),
    (ties(0.25), ([1, -1, 1, 0.5],), [1, -1, 1, 0]),  # all that equal the threshold survive
    (ties(1.0), ([2, -3], [-2, 3]), [2, 3]),  # entries that cancel elect plus
    (ties(0.3), ([2, -3, 1],), [0, 0, 0]),  # less than one entry
    (ties_mergekit(0.01), ([1, -3, 2],), [0, -3, 0]),  # one entry, however small the density
    (ties_mergekit(weights=(1.0, -1.0)), ([2.0], [-3.0]), [5.0]),  # weights that cancel do not divide
    (ties_fusionbench(0.4, scale=1.0), ([5, -4, 3, 2, 1],), [5, -4, 3, 0, 0]),  # one entry more than the paper
    (ties_fusionbench(1.0, scale=1.0, merge="sum"), MAJORITY, {"w": [-6, -3, 4]}),
    (ties_fusionbench(1.0, scale=1.0, merge="mean"), MAJORITY, {"w": [-3, -3, 2]}),
    (ties_fusionbench(1.0, scale=1.0, merge="max"), MAJORITY, {"w": [-4, -3, 3]}),
    (ties_fusionbench(1.0, scale=1.0, merge="sum"), DRAW, [-3, 2, -2]),
    (ties_fusionbench(1.0, scale=1.0, merge="mean"), DRAW, [-3, 1, -1]),
    (ties_fusionbench(1.0, scale=1.0, merge="max"), DRAW, [0, 1, -1]),
]
WEIGHED = ([4, 1, -2], [-3, 2, -1])
NEAR: list[tuple[Any, tuple[Any, ...], Any]] = [
    (ModelStock(), ([5, 0], [3, 4]), [3.0, 1.5]),  # cos = 3/5, so t = 2 * 0.6 / 1.6 = 0.75, of the mean (4, 2)
    (ModelStock(), ([1, 2], [2, 4], [3, 6]), [2.0, 4.0]),  # parallel: the average
    (Slerp(0.5), ([2, 0], [0, 2]), [2**0.5, 2**0.5]),
    (Slerp(0.5), ([0, 0], [0, 2]), [0.0, 2**0.5]),  # no angle: taken for a right one, as in mergekit
    # Weighted: [0.4, 0.1, -0.2] and [-2.7, 1.8, -0.9]: the lighter expert loses its four.
    (ties_mergekit(weights=(0.1, 0.9)), WEIGHED, [-3.0, 1.9, -1.1]),
    (ties_mergekit(weights=(0.1, 0.9), normalize=False, scale=2.0), WEIGHED, [-5.4, 3.8, -2.2]),
    # The sums 1, 3, -3 elect +, +, -; then the weights; then half where both agree.
    (ties_peft(1.0, (0.1, 0.9)), WEIGHED, [0.4, 0.95, -0.55]),
]


@pytest.mark.parametrize(("method", "experts", "expected"), EXACT, ids=[f"{case[0]}" for case in EXACT])
def test_by_hand(method: Any, experts: tuple[Any, ...], expected: Any) -> None:
    result = merged(method, vectors_of(*experts))
    wanted = expected if isinstance(expected, dict) else {"w": expected}
    assert {key: result[key].tolist() for key in wanted} == wanted


@pytest.mark.parametrize(("method", "experts", "expected"), NEAR, ids=[f"{case[0]}" for case in NEAR])
def test_by_hand_but_for_rounding(method: Any, experts: tuple[Any, ...], expected: list[float]) -> None:
    torch.testing.assert_close(merged(method, vectors_of(*experts))["w"], torch.tensor(expected))


ROWS = [torch.tensor([1.0, -2.0, 3.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, -5.0, -2.0, 0.0])]
SIGN = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])


def test_trim_keeps_what_is_as_large_as_the_threshold() -> None:
    row = torch.tensor([0.5, -0.5, 0.49999997, 0.0, -3.0])
    assert trim([row], [0.5])[0].tolist() == [0.5, -0.5, 0.0, 0.0, -3.0]
    row = torch.tensor([1e-45, -1.0, 3.4028235e38, 0.0])
    nothing, everything, smallest = trim([row] * 3, [float("inf"), 0.0, float(row[0])])
    assert not nothing.any()
    assert everything is row
    assert torch.equal(smallest, row)


def test_steps_of_ties() -> None:
    assert torch.equal(elect_sign(ROWS), SIGN)  # a sum of zero elects plus
    assert total(ROWS).tolist() == [3.0, -1.0, -2.0, 0.0, 0.0]
    assert disjoint(ROWS, SIGN).tolist() == [3.0, -2.0, -5.0, 2.0, 0.0]
    assert disjoint_mean(ROWS, SIGN).tolist() == [1.5, -2.0, -5.0, 2.0, 0.0]
    assert disjoint(ROWS, SIGN, join=torch.maximum).tolist() == [2.0, -2.0, -5.0, 2.0, 0.0]
    assert disjoint_mean(ROWS, SIGN, factors=(10.0, 1.0)).tolist() == [6.0, -20.0, -5.0, 20.0, 0.0]
    assert disjoint_mean(ROWS, SIGN, votes=(0.5, 0.25)).tolist() == [4.0, -4.0, -20.0, 4.0, 0.0]
    assert disjoint_mean(ROWS, SIGN, votes=(1.0, -1.0)).tolist() == [3.0, -2.0, 5.0, 2.0, 0.0]  # 1 - 1: left
