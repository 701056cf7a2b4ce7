"""A density is one: it integrates to 1, and of one value it is the kernel itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orthomerge.analysis.density import bandwidth, density, span
from orthomerge.core.errors import NumericalError, RecipeError


@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_it_integrates_to_one(count: int) -> None:
    values = np.random.default_rng(count).normal(3.0, 0.7, count)
    grid = span(values, points=4001)
    assert np.trapezoid(density(values, grid), grid) == pytest.approx(1, abs=1e-3)


def test_nothing_goes_beyond_an_end_and_nothing_is_lost_there() -> None:
    values = 1 - np.random.default_rng(0).exponential(0.02, 500)
    grid = span(values, points=4001, ends=(-1.0, 1.0))
    assert grid[-1] == 1.0
    assert np.trapezoid(density(values, grid, ends=(-1.0, 1.0)), grid) == pytest.approx(1, abs=1e-3)
    assert density(values, [1.001, -1.001], ends=(-1.0, 1.0)).tolist() == [0.0, 0.0]


def test_one_value_is_the_kernel() -> None:
    assert density([2.0], [2.0, 2.5], width=0.5) == pytest.approx(
        [1 / (0.5 * math.sqrt(2 * math.pi)), math.exp(-0.5) / (0.5 * math.sqrt(2 * math.pi))]
    )


def test_equal_values_are_a_narrow_peak() -> None:
    values = np.ones(50)
    assert bandwidth(values) == 1e-3
    grid = span(values)
    assert np.trapezoid(density(values, grid), grid) == pytest.approx(1, abs=1e-3)


def test_the_width_by_hand() -> None:
    values = np.arange(1.0, 10.0)  # deviation sqrt(60 / 9), quarters 3 and 7
    assert bandwidth(values) == pytest.approx(0.9 * min(math.sqrt(60 / 9), 4 / 1.34) * 9**-0.2)


def test_what_is_no_list_of_numbers_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least one value"):
        density([], [0.0])
    with pytest.raises(NumericalError, match="1 of 2 values are not finite"):
        bandwidth([1.0, math.nan])
    with pytest.raises(RecipeError, match="'width' of a kernel must be positive"):
        density([1.0], [1.0], width=0.0)
