"""Planted maps are found and measured on other inputs; cosines, histograms and points in the plane by hand."""

from __future__ import annotations

import base64
import math
import sys
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.alignment.planted import doubles, turn

from orthomerge.alignment.folding import first_map, logits_from, read_by
from orthomerge.analysis import families
from orthomerge.analysis.detail import chosen_inputs
from orthomerge.analysis.diagnosis import Bars, Lines, figure_key
from orthomerge.analysis.families import Reading, family_figures, fit_maps, read_logits, relative_distance
from orthomerge.analysis.geometry import Geometry, geometry_figures
from orthomerge.analysis.points import embed, moved, rotated, short_text, thumbnails
from orthomerge.core.errors import RecipeError
from orthomerge.models.heads import Linear
from orthomerge.testing.toys import HEADS, head_of, linear_head, random


def test_a_planted_rotation_is_found() -> None:
    T, A = doubles(300, 6), turn(6)
    H = T @ A  # A h = t
    maps: Any = fit_maps(H, T, task="toy")
    assert tuple(maps) == families.FAMILIES
    for family in ("orthogonal", "similarity", "rigid", "linear", "affine", "invertible"):
        torch.testing.assert_close(maps[family].weight, A, atol=2e-3, rtol=0)
    orthogonal = maps["orthogonal"]
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
    # One input changes nothing.
    maps = fit_maps(doubles(1, 3), doubles(1, 3, seed=1), task="toy")
    X = doubles(4, 3, seed=2)
    for family in ("none", "orthogonal", "linear", "affine"):
        torch.testing.assert_close(maps[family](X), X)


@pytest.mark.parametrize("kind", HEADS)
def test_the_identity_reads_as_the_head_does(kind: str) -> None:
    head = head_of(kind)
    H, T = read_by(head, doubles(30, 6)), read_by(head, doubles(30, 6, seed=1))
    truth = logits_from(head, T).argmax(1)
    perfect = read_logits(logits_from(head, T), logits_from(head, T), head=head, truth=truth)
    assert (relative_distance(T, T), perfect.hits.mean()) == (0, 1)
    assert perfect.kl == pytest.approx(0, abs=1e-12)
    other = read_logits(logits_from(head, H), logits_from(head, T), head=head, truth=truth)
    assert other.kl > 0
    assert other.hits.mean() < 1


def test_distance_and_divergence_by_hand() -> None:
    T = torch.tensor([[2.0, 0.0], [-2.0, 0.0]])
    assert relative_distance(torch.tensor([[2.0, 1.0], [-2.0, -3.0]]), T) == pytest.approx(2 / 2)
    assert relative_distance(torch.zeros(2, 2), T) == pytest.approx(1)
    assert math.isnan(relative_distance(T, torch.ones(2, 2)))
    even, sure = torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]])
    kl = read_logits(even, sure, head=head_of("linear"), truth=torch.tensor([0])).kl
    assert kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_figures() -> None:
    right = np.array([True, True, False, True])
    reading = {"a": Reading(0.5, 0.1, right), "b": Reading(0.7, 0.3, ~right)}
    plain = {task: Reading(math.nan, one.kl, one.hits) for task, one in reading.items()}
    experts = {"a": np.ones(4, bool), "b": np.ones(4, bool)}
    figures: Any = family_figures({"none": reading, "aligner auto": plain}, experts, fitted="train")
    assert [type(figure) for figure in figures[:3]] == [Bars] * 3
    accuracy, distance, kl, heat = figures
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
    # One input can be measured and drawn.
    found = Geometry.of(random(1, 4), random(1, 4, seed=1))
    figures = geometry_figures({"a": dict.fromkeys(("none", "orthogonal", "linear"), found)}, fitted="train")
    assert [figure.key for figure in figures] == ["cosine", "coefficient", "cosine-by-task"]


def test_every_task_counts_alike_in_a_histogram() -> None:
    many = Geometry(np.full(1000, 0.2), np.full(1000, 1.0))
    few = Geometry(np.full(10, 0.8), np.full(10, 1.0))
    tasks = {task: dict.fromkeys(("none", "orthogonal", "linear"), one) for task, one in (("many", many), ("few", few))}
    figures: Any = geometry_figures(tasks, fitted="train")
    lines, _, bars = figures
    assert (type(lines), type(bars)) == (Lines, Bars)
    curve = lines.curves[0]
    width = curve.x[1] - curve.x[0]
    areas = {x: width * y for x, y in zip(curve.x, curve.y, strict=True) if y}
    assert [curve.name for curve in lines.curves] == ["raw", "orthogonal", "linear"]
    assert "fitted on train inputs" in lines.caption
    assert bars.series[0].values == (0.2, 0.8)
    assert list(areas) == pytest.approx([0.2, 0.8], abs=width)
    assert list(areas.values()) == pytest.approx([0.5, 0.5])


def test_clusters_stay_apart_and_a_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.cat([random(30, 5, seed=1), random(30, 5, seed=2) + 40.0])
    points = embed(X, seed=3)
    assert points.shape == (60, 2)
    assert abs(points.mean()) < 1e-3
    gap = np.linalg.norm(points[:30].mean(0) - points[30:].mean(0))
    assert gap > 2 * max(points[:30].std(), points[30:].std())
    np.testing.assert_array_equal(points, embed(X, seed=3))
    assert embed(random(5, 3)).shape == (5, 2)
    np.testing.assert_array_equal(embed(torch.full((9, 3), 0.1)), np.zeros((9, 2)))
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(RecipeError, match="t-SNE needs scikit-learn: pip install"):
        embed(X)


def test_a_rotation_and_a_mirror_are_undone() -> None:
    onto = random(20, 2, seed=1).double().numpy()
    onto -= onto.mean(0)
    angle = 2.2
    A = np.array([[math.cos(angle), -math.sin(angle)], [-math.sin(angle), -math.cos(angle)]])
    np.testing.assert_allclose(rotated(onto @ A, onto=onto), onto, atol=1e-9)


@pytest.mark.parametrize("kind", HEADS)
def test_moved_features_read_as_the_aligned_head_says(kind: str) -> None:
    head = head_of(kind)
    first = first_map(head)
    other = Linear(first.weight + 0.1 * random(*first.weight.shape, seed=8), first.bias)
    aligned = replace(head, hidden=other) if head.hidden else replace(head, output=other)
    values = random(12, 6, seed=9)
    found = moved(aligned, values, head=head)
    assert found is not None
    wanted = logits_from(aligned, read_by(aligned, values))
    torch.testing.assert_close(logits_from(head, found), wanted, atol=1e-5, rtol=1e-4)


def test_a_classifier_that_is_no_head_is_moved_by_its_logits() -> None:
    class Twice:
        labels = ("class 0", "class 1")

        def __call__(self, features: torch.Tensor) -> torch.Tensor:
            return 2 * head(features)

    head = linear_head(torch.eye(2, 3))
    found = moved(Twice(), torch.ones(1, 3), head=head)
    assert found is not None
    assert found.tolist() == [[2, 2, 1]]
    assert moved(Twice(), torch.ones(1, 6), head=head_of("hidden")) is None


def test_some_inputs_keep_the_shares_of_classes() -> None:
    labels = np.array([0] * 80 + [1] * 20)
    places = chosen_inputs(labels, 100, most=50, seed=0)
    assert (len(places), (labels[places] == 1).sum()) == (50, 10)
    np.testing.assert_array_equal(chosen_inputs(labels, 100, most=200, seed=0), np.arange(100))
    for same in (None, np.zeros(100, dtype=np.int64)):
        assert len(chosen_inputs(same, 100, most=7, seed=0)) == 7


def test_pictures_are_small_and_within_their_budget() -> None:
    colour = np.random.default_rng(0).integers(0, 255, (100, 60, 3), dtype=np.uint8)
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for uri, size in zip(thumbnails([colour, grey], most=10_000), ((19, 32), (8, 8)), strict=True):
        kind, _, data = uri.partition(",")
        assert kind == "data:image/png;base64"
        assert Image.open(BytesIO(base64.b64decode(data))).size == size
    smaller = thumbnails([colour] * 20, most=12_000)
    assert len(smaller) == 20
    assert sum(map(len, smaller)) <= 12_000
    assert thumbnails([colour] * 20, most=2000) == ()


def test_texts_are_cut_and_keys_are_plain_and_told_apart() -> None:
    assert short_text("a\n b") == "a b"
    assert len(short_text("word " * 100)) == 200
    names = ("SST-2", "sst 2", "<b>", "été")
    found = [figure_key("tsne", name, among=names) for name in names]
    assert found == ["tsne-sst-2-1", "tsne-sst-2-2", "tsne-b", "tsne-t"]
    assert figure_key("tsne", "日本", among=("日本",)) == "tsne-task-1"
