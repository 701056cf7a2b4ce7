"""Maps are found where they were planted, and families are measured on other inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.alignment.planted import doubles, turn

from orthomerge.alignment.folding import logits_from, read_by
from orthomerge.analysis.families import (
    FAMILIES,
    Reading,
    family_figures,
    fit_maps,
    read_logits,
    read_mapped,
    relative_distance,
)
from orthomerge.analysis.figures import Bars
from orthomerge.core.errors import NumericalError
from orthomerge.models.heads import Linear
from orthomerge.testing.toys import HEADS, head_of


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


def test_bad_features_are_refused() -> None:
    with pytest.raises(NumericalError, match="merged features of 'toy' are NaN"):
        fit_maps(torch.full((3, 2), math.nan), doubles(3, 2), task="toy")


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
