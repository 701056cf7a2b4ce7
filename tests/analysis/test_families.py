"""Planted maps are found and measured on other inputs; cosines, coefficients and densities by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.alignment.planted import doubles, turn

from orthomerge.alignment.folding import logits_from, read_by
from orthomerge.analysis.diagnosis import Bars, Lines
from orthomerge.analysis.families import (
    FAMILIES,
    Reading,
    family_figures,
    fit_maps,
    read_logits,
    read_mapped,
    relative_distance,
)
from orthomerge.analysis.geometry import Geometry, bandwidth, density, geometry_figures, span
from orthomerge.models.heads import Linear
from orthomerge.testing.toys import HEADS, head_of, random


def linear(mapped: object) -> Linear:
    assert isinstance(mapped, Linear)
    return mapped


def test_a_planted_rotation_is_found() -> None:
    T, A = doubles(300, 6), turn(6)
    H = T @ A  # A h = t
    maps = fit_maps(H, T, task="toy")
    assert tuple(maps) == FAMILIES
    for family in ("orthogonal", "similarity", "rigid", "linear", "affine", "invertible"):
        torch.testing.assert_close(linear(maps[family]).weight, A, atol=2e-3, rtol=0)
    orthogonal = linear(maps["orthogonal"])
    torch.testing.assert_close(orthogonal.weight @ orthogonal.weight.T, torch.eye(6, dtype=torch.float64))
    assert orthogonal.bias is None


def test_a_planted_shift_needs_a_family_with_one() -> None:
    T = doubles(300, 4)
    H = T - torch.tensor([3.0, 0, 0, -1.0], dtype=torch.float64)
    maps = fit_maps(H, T, task="toy")
    test = doubles(50, 4, seed=9)
    left = {name: relative_distance(G(test - torch.tensor([3.0, 0, 0, -1.0])), test) for name, G in maps.items()}
    assert left["rigid"] < 0.05
    assert left["affine"] < 0.05
    assert min(left["orthogonal"], left["similarity"], left["scaling"]) > 0.5


def test_one_input_changes_nothing() -> None:
    maps = fit_maps(doubles(1, 3), doubles(1, 3, seed=1), task="toy")
    X = doubles(4, 3, seed=2)
    for family in ("none", "orthogonal", "linear", "affine"):
        torch.testing.assert_close(maps[family](X), X)


@pytest.mark.parametrize("kind", HEADS)
def test_the_identity_reads_as_the_head_does(kind: str) -> None:
    head = head_of(kind)
    H, T = read_by(head, doubles(30, 6)), read_by(head, doubles(30, 6, seed=1))
    truth = logits_from(head, T).argmax(1)
    perfect = read_mapped(torch.Tensor.double, T, T, head=head, truth=truth)
    assert (perfect.distance, perfect.hits.mean()) == (0, 1)
    assert perfect.kl == pytest.approx(0, abs=1e-12)
    other = read_mapped(torch.Tensor.double, H, T, head=head, truth=truth)
    assert other.kl > 0
    assert other.hits.mean() < 1


def test_distance_and_divergence_by_hand() -> None:
    T = torch.tensor([[2.0, 0.0], [-2.0, 0.0]])
    assert relative_distance(torch.tensor([[2.0, 1.0], [-2.0, -3.0]]), T) == pytest.approx(2 / 2)
    assert relative_distance(torch.zeros(2, 2), T) == pytest.approx(1)
    assert math.isnan(relative_distance(T, torch.ones(2, 2)))
    even, sure = torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]])
    assert read_logits(even, sure, head=head_of("linear"), truth=torch.tensor([0])).kl == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    )


def test_figures() -> None:
    right = np.array([True, True, False, True])
    reading = {"a": Reading(0.5, 0.1, right), "b": Reading(0.7, 0.3, ~right)}
    plain = {task: Reading(math.nan, one.kl, one.hits) for task, one in reading.items()}
    experts = {"a": np.ones(4, bool), "b": np.ones(4, bool)}
    accuracy, distance, kl, heat = family_figures({"none": reading, "aligner auto": plain}, experts, fitted="train")
    assert isinstance(accuracy, Bars)
    assert isinstance(distance, Bars)
    assert isinstance(kl, Bars)
    assert accuracy.groups == ("none", "aligner auto", "expert")
    assert accuracy.series[0].values == pytest.approx((50, 50, 100))
    assert accuracy.series[0].low is not None
    assert all(low <= value for low, value in zip(accuracy.series[0].low, accuracy.series[0].values, strict=True))
    assert distance.groups == ("none",)
    assert distance.series[0].values == pytest.approx((0.6,))
    assert kl.series[0].values == pytest.approx((0.2, 0.2))
    assert heat.key == "families-by-task"


def test_cosine_and_coefficient_by_hand() -> None:
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
