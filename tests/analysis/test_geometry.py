"""Cosine and coefficient: 1 and 1 of identical features; densities that integrate to 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from orthomerge.analysis.figures import Bars, Lines
from orthomerge.analysis.geometry import Geometry, bandwidth, density, geometry_figures, span
from orthomerge.testing.toys import random


def test_by_hand() -> None:
    X = random(20, 6)
    same = Geometry.of(X, X)
    np.testing.assert_allclose([same.cosine, same.coefficient], np.ones((2, 20)))
    merged, expert = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[5.0, 0.0], [0.0, 4.0]])
    found = Geometry.of(merged, expert)
    assert found.cosine.tolist() == pytest.approx([0.6, 1.0])
    assert found.coefficient.tolist() == pytest.approx([15 / 25, 8 / 16])
    no_direction = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    assert np.isnan(Geometry.of(no_direction, torch.ones(2, 2)).cosine).tolist() == [True, False]


def test_one_input_can_be_measured_and_drawn() -> None:
    found = Geometry.of(random(1, 4), random(1, 4, seed=1))
    figures = geometry_figures({"a": dict.fromkeys(("none", "orthogonal", "linear"), found)}, fitted="train")
    assert [figure.key for figure in figures] == ["cosine", "coefficient", "cosine-by-task"]


def test_every_task_counts_alike_in_a_density() -> None:
    many = Geometry(np.full(1000, 0.2), np.full(1000, 1.0))
    few = Geometry(np.full(10, 0.8), np.full(10, 1.0))
    kinds = ("none", "orthogonal", "linear")
    lines, _, bars = geometry_figures(
        {"many": dict.fromkeys(kinds, many), "few": dict.fromkeys(kinds, few)}, fitted="train"
    )
    assert isinstance(lines, Lines)
    assert isinstance(bars, Bars)
    curve = lines.curves[0]
    middle = [x < 0.5 for x in curve.x]
    below = np.trapezoid([y for y, low in zip(curve.y, middle, strict=True) if low], [x for x in curve.x if x < 0.5])
    assert [curve.name for curve in lines.curves] == ["raw", "orthogonal", "linear"]
    assert "fitted on train inputs" in lines.caption
    assert bars.series[0].values == (0.2, 0.8)
    assert below == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_it_integrates_to_one(count: int) -> None:
    values = np.random.default_rng(count).normal(3.0, 0.7, count)
    grid = span(values, points=4001)
    assert np.trapezoid(density(values, grid, width=bandwidth(values)), grid) == pytest.approx(1, abs=1e-3)


def test_nothing_goes_beyond_an_end_and_nothing_is_lost_there() -> None:
    values = 1 - np.random.default_rng(0).exponential(0.02, 500)
    grid = span(values, points=4001, ends=(-1.0, 1.0))
    assert grid[-1] == 1.0
    assert np.trapezoid(density(values, grid, width=bandwidth(values), ends=(-1.0, 1.0)), grid) == pytest.approx(
        1, abs=1e-3
    )
    assert density(values, np.array([1.001, -1.001]), width=0.1, ends=(-1.0, 1.0)).tolist() == [0.0, 0.0]


def test_the_kernel_and_its_width_by_hand() -> None:
    values = np.arange(1.0, 10.0)  # deviation sqrt(60 / 9), quarters 3 and 7
    assert bandwidth(values) == pytest.approx(0.9 * min(math.sqrt(60 / 9), 4 / 1.34) * 9**-0.2)
    assert density(np.array([2.0]), np.array([2.0, 2.5]), width=0.5) == pytest.approx(
        [1 / (0.5 * math.sqrt(2 * math.pi)), math.exp(-0.5) / (0.5 * math.sqrt(2 * math.pi))]
    )


def test_equal_values_are_a_narrow_peak() -> None:
    values = np.ones(50)
    assert bandwidth(values) == 1e-3
    grid = span(values)
    assert np.trapezoid(density(values, grid, width=bandwidth(values)), grid) == pytest.approx(1, abs=1e-3)
