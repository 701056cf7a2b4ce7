"""Current, KNN and the probe on toys whose answers are worked out by hand, and the table that names them."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint
from itertools import product
from typing import Any

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.evaluation import knn, protocols
from orthomerge.evaluation.knn import Knn
from orthomerge.evaluation.metrics import counted, predict
from orthomerge.evaluation.probe import Probe
from orthomerge.evaluation.protocols import Current, EvaluationProtocol, Evidence, Row, find_protocol
from orthomerge.models.features import Features
from orthomerge.testing.toys import linear_head, random


def support_of(values: Any, labels: Any = None) -> Features:
    numbers = None if labels is None else torch.as_tensor(labels, dtype=torch.int64)
    return Features(torch.as_tensor(values, dtype=torch.float32), "toy", "train", numbers)


def test_current_by_hand() -> None:
    head = linear_head(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, -1.0]]), torch.tensor([0.0, -1.0, 0.5]))
    classifier = Current().build(Evidence(head))
    assert classifier is head
    features = torch.tensor([[3.0, 1.0], [1.0, 2.0], [-1.0, -2.0]])
    assert classifier(features).tolist() == [[3, 1, -3.5], [1, 3, -2.5], [-1, -5, 3.5]]
    assert predict(classifier, features).tolist() == [0, 1, 2]


class TestKnn:
    # Distances from the origin:  a 1, 2, 3, 34 (mean 10)   b 8, 8 (mean 8)   c 4, 6 (mean 5)
    ANCHORS = ((1, 0), (0, 6), (0, -2), (8, 0), (34, 0), (0, 4), (-8, 0), (-3, 0))
    CLASSES = (0, 2, 0, 1, 0, 2, 1, 0)

    def test_by_hand_where_neighbours_and_centroids_say_otherwise(self) -> None:
        head = linear_head(torch.zeros(3, 2))
        classifier = Knn().build(Evidence(head, support_of(self.ANCHORS, self.CLASSES)))
        logits = classifier(torch.zeros(1, 2))
        torch.testing.assert_close(logits, torch.tensor([[-10.0, -8.0, -5.0]]))
        assert logits.argmax(1).tolist() == [2]

        anchors, classes = torch.tensor(self.ANCHORS, dtype=torch.float32), torch.tensor(self.CLASSES)
        nearest = classes[anchors.norm(dim=1).argsort()[:3]]
        assert nearest.tolist() == [0, 0, 0]
        centroids = torch.stack([anchors[classes == c].mean(0) for c in range(3)])
        assert centroids.norm(dim=1).argmin() == 1

    def test_a_class_without_support_is_infinitely_far(self) -> None:
        classifier = Knn().build(Evidence(linear_head(torch.zeros(3, 1)), support_of([[1.0], [5.0]], [2, 0])))
        assert classifier(torch.tensor([[2.0], [100.0]])).tolist() == [[-3, -math.inf, -1], [-95, -math.inf, -99]]
        assert classifier.labels == linear_head(torch.zeros(3, 1)).labels

    def test_blocks_and_a_far_origin_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        anchors, classes = random(50, 6) + 1000, torch.arange(50) % 3
        features = random(33, 6, seed=1) + 1000
        every = (features.double()[:, None] - anchors.double()).norm(dim=2)
        expected = -torch.stack([every[:, classes == c].mean(1) for c in range(3)], 1)
        evidence = Evidence(linear_head(torch.zeros(3, 6)), support_of(anchors, classes))
        for most in (1, 170, 1 << 22):
            monkeypatch.setattr(knn, "_MOST", most)
            torch.testing.assert_close(Knn().build(evidence)(features), expected.float())

    def test_two_classes_at_one_distance(self) -> None:
        classifier = Knn().build(Evidence(linear_head(torch.zeros(2, 1)), support_of([[1.0], [-1.0]], [1, 0])))
        assert predict(classifier, torch.zeros(1, 1)).tolist() == [0]


class TestProbe:
    def test_the_optimum_by_hand(self) -> None:
        # Features 3 and 7, standardised -1 and 1. By symmetry V = (-v, v), c = 0, and the loss log(1 + exp(-2 v)) +
        # l2 v^2 is least where 2 / (1 + exp(2 v)) = 2 l2 v.
        low, high = 0.0, 10.0
        for _ in range(100):
            v = (low + high) / 2
            low, high = (v, high) if 1 / (1 + math.exp(2 * v)) > 0.01 * v else (low, v)
        evidence = Evidence(linear_head(torch.zeros(2, 1)), support_of([[3.0], [7.0], [3.0], [7.0]], [0, 1, 0, 1]))
        probe = Probe(l2=0.01).build(evidence)
        torch.testing.assert_close(probe.output.weight, torch.tensor([[-v], [v]]) / 2, rtol=1e-4, atol=0)
        logits = probe(torch.tensor([[3.0], [5.0], [7.0]]))
        torch.testing.assert_close(logits, torch.tensor([[v, -v], [0, 0], [-v, v]]), rtol=1e-4, atol=1e-4)

    def test_separable_classes_are_separated_and_the_gradient_is_zero(self) -> None:
        labels = torch.arange(300) % 3
        features = (6 * torch.eye(3, 10))[labels] + random(300, 10) * torch.logspace(-2, 0, 10) + 50
        features[:, 9] = 4  # constant: nothing to learn from, nothing to divide by
        probe = Probe(l2=1e-2).build(Evidence(linear_head(torch.zeros(3, 10)), support_of(features, labels)))
        assert counted(predict(probe, features), labels).value == 1
        sigma = features.double().std(0, correction=0)
        sigma[9] = 1
        V = probe.output.weight.double() * sigma
        error = probe(features).double().softmax(1) - torch.eye(3, dtype=torch.float64)[labels]
        gradient = error.T @ ((features.double() - features.double().mean(0)) / sigma) / 300 + 1e-2 * V
        assert gradient.abs().max() < 1e-4
        assert error.mean(0).abs().max() < 1e-4

    @pytest.mark.parametrize(("seen", "missing"), [([0, 2], 1), ([1, 1], 0)])
    def test_a_class_without_support_is_never_predicted(self, seen: list[int], missing: int) -> None:
        probe = Probe().build(Evidence(linear_head(torch.zeros(3, 1)), support_of([[0.0], [1.0]], seen)))
        assert probe(torch.zeros(1, 1))[0, missing] == -math.inf
        assert predict(probe, torch.tensor([[0.0], [1.0]])).tolist() == seen

    def test_options(self) -> None:
        for l2 in (0.0, -1.0, math.inf):
            with pytest.raises(RecipeError, match=f"'l2' must be positive, got {l2}"):
                Probe(l2=l2)
        with pytest.raises(RecipeError, match="'steps' must be at least 1, got 0"):
            Probe(steps=0)


def test_evidence_that_is_not_enough() -> None:
    messages = {
        "knn": "'knn' needs labels of its support inputs, got none; use a labelled split",
        "aligned-c": "an aligner needs features of its support inputs by the model and the expert, got none",
    }
    for name, support in product(messages, (None, support_of(torch.ones(4, 2)))):
        with pytest.raises(RecipeError, match=messages[name]):
            EvaluationProtocol(name).builder().build(Evidence(linear_head(torch.ones(3, 2)), support))


def test_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"x:mine": Row("mine", "x:Mine", "Mine", "me"), "x:knn": Row("knn", "x:Knn", "Taken", "me")}

    def install(value: str) -> None:
        protocols.protocols.cache_clear()
        monkeypatch.setattr(EntryPoint, "load", lambda entry: rows[entry.value])
        entry = EntryPoint("name", value, "orthomerge.protocols")
        monkeypatch.setattr("orthomerge.core.schema.entry_points", lambda group: [entry])

    install("x:mine")
    assert find_protocol("mine").title == "Mine"
    install("x:knn")
    with pytest.raises(RecipeError, match="the plug-in 'x:knn' must be a Row with a name of its own"):
        find_protocol("mine")
    protocols.protocols.cache_clear()
