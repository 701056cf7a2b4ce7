"""Points in the plane: rotated onto each other, the same for one seed, and defined for constant inputs."""

from __future__ import annotations

import base64
import math
import sys
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from orthomerge.alignment.folding import first_map, logits_from, read_by
from orthomerge.analysis.detail import chosen_inputs
from orthomerge.analysis.diagnosis import figure_key
from orthomerge.analysis.points import embed, moved, rotated, short_text, thumbnails
from orthomerge.core.errors import RecipeError
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.toys import HEADS, head_of, linear_head, random


def clusters(count: int = 30) -> torch.Tensor:
    return torch.cat([random(count, 5, seed=1), random(count, 5, seed=2) + 40.0])


def test_clusters_stay_apart_and_a_seed_decides() -> None:
    X = clusters()
    points = embed(X, seed=3)
    assert points.shape == (60, 2)
    assert abs(points.mean()) < 1e-3
    gap = np.linalg.norm(points[:30].mean(0) - points[30:].mean(0))
    assert gap > 2 * max(points[:30].std(), points[30:].std())
    np.testing.assert_array_equal(points, embed(X, seed=3))


def test_few_inputs_and_inputs_that_are_all_the_same() -> None:
    assert embed(random(5, 3)).shape == (5, 2)
    np.testing.assert_array_equal(embed(torch.full((9, 3), 0.1)), np.zeros((9, 2)))


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
    aligned = (
        Head(head.output, head.labels, other, head.activation)
        if head.hidden
        else Head(other, head.labels, normalise=head.normalise)
    )
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


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(RecipeError, match="t-SNE needs scikit-learn: pip install"):
        embed(clusters())


def test_texts_are_cut_and_keys_are_plain_and_told_apart() -> None:
    assert short_text("a\n b") == "a b"
    assert len(short_text("word " * 100)) == 200
    names = ("SST-2", "sst 2", "<b>", "été")
    found = [figure_key("tsne", name, among=names) for name in names]
    assert found == ["tsne-sst-2-1", "tsne-sst-2-2", "tsne-b", "tsne-t"]
    assert figure_key("tsne", "日本", among=("日本",)) == "tsne-task-1"
