"""Current, KNN, aligned-c and the probe on toys whose answers are worked out by hand, and the table that names them."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from orthomerge.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError
from orthomerge.evaluation import knn, protocols
from orthomerge.evaluation.aligned_c import AlignedC, Schedule, divergence
from orthomerge.evaluation.current import Current
from orthomerge.evaluation.knn import Knn
from orthomerge.evaluation.metrics import accuracy, predict, predictions
from orthomerge.evaluation.probe import Probe
from orthomerge.evaluation.protocol import Evidence
from orthomerge.evaluation.protocols import PROTOCOLS, Row, find_protocol, make_protocol, protocol_class
from orthomerge.features.features import Features
from orthomerge.heads import Head, Linear

LABELS = ("a", "b", "c")


def head_of(weight: torch.Tensor, bias: torch.Tensor | None = None, **more: Any) -> Head:
    return Head(Linear(weight, bias), tuple(LABELS[: len(weight)]), **more)


def support_of(values: Any, labels: Any = None) -> Features:
    numbers = None if labels is None else torch.as_tensor(labels, dtype=torch.int64)
    return Features(torch.as_tensor(values, dtype=torch.float32), "toy", "train", numbers)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(d: int, *, angle: float, seed: int) -> torch.Tensor:
    A = random(d, d, seed=seed)
    return torch.matrix_exp(angle * (A - A.T) / math.sqrt(2 * d))


class TestCurrent:
    def test_by_hand(self) -> None:
        head = head_of(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, -1.0]]), torch.tensor([0.0, -1.0, 0.5]))
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
        head = head_of(torch.zeros(3, 2))
        classifier = Knn().build(Evidence(head, support_of(self.ANCHORS, self.CLASSES)))
        logits = classifier(torch.zeros(1, 2))
        torch.testing.assert_close(logits, torch.tensor([[-10.0, -8.0, -5.0]]))
        assert predictions(logits).tolist() == [2]

        anchors, classes = torch.tensor(self.ANCHORS, dtype=torch.float32), torch.tensor(self.CLASSES)
        nearest = classes[anchors.norm(dim=1).argsort()[:3]]
        assert nearest.tolist() == [0, 0, 0]
        centroids = torch.stack([anchors[classes == c].mean(0) for c in range(3)])
        assert centroids.norm(dim=1).argmin() == 1

    def test_a_class_without_support_is_infinitely_far(self) -> None:
        classifier = Knn().build(Evidence(head_of(torch.zeros(3, 1)), support_of([[1.0], [5.0]], [2, 0])))
        assert classifier(torch.tensor([[2.0], [100.0]])).tolist() == [[-3, -math.inf, -1], [-95, -math.inf, -99]]
        assert classifier.labels == LABELS

    def test_the_first_of_two_classes_at_one_distance(self) -> None:
        classifier = Knn().build(Evidence(head_of(torch.zeros(2, 1)), support_of([[1.0], [-1.0]], [1, 0])))
        assert predict(classifier, torch.zeros(1, 1)).tolist() == [0]

    def test_blocks_and_a_far_origin_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        anchors, classes = random(50, 6) + 1000, torch.arange(50) % 3
        features = random(33, 6, seed=1) + 1000
        every = (features.double()[:, None] - anchors.double()).norm(dim=2)
        expected = -torch.stack([every[:, classes == c].mean(1) for c in range(3)], 1)
        evidence = Evidence(head_of(torch.zeros(3, 6)), support_of(anchors, classes))
        for most in (1, 170, 1 << 22):
            monkeypatch.setattr(knn, "_MOST", most)
            torch.testing.assert_close(Knn().build(evidence)(features), expected.float())

    def test_features_of_another_width(self) -> None:
        classifier = Knn().build(Evidence(head_of(torch.zeros(2, 1)), support_of([[1.0], [2.0]], [1, 0])))
        with pytest.raises(IncompatibleError, match=r"features must be \[n, 1\] like the anchors, got \(4, 2\)"):
            classifier(torch.zeros(4, 2))


class TestAlignedC:
    def test_one_step_by_hand(self) -> None:
        # p = (1/3, 1/3, 1/3), teacher (1/2, 1/4, 1/4): p - q = (-1/6, 1/12, 1/12); times x = (2, -1) the gradient has
        # the signs below, and Adam's first step is lr against the sign.
        head = head_of(torch.zeros(3, 2), torch.zeros(3))
        evidence = Evidence(head, support_of([[2.0, -1.0]]), torch.tensor([[math.log(2), 0.0, 0.0]]))
        aligned = AlignedC("paper", epochs=1).build(evidence)
        lr = 5e-4
        torch.testing.assert_close(
            aligned.output.weight, lr * torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, 1.0]]), rtol=1e-5, atol=0
        )
        assert aligned.output.bias is not None
        torch.testing.assert_close(aligned.output.bias, lr * torch.tensor([1.0, -1.0, -1.0]), rtol=1e-5, atol=0)
        assert not head.output.weight.any(), "the expert's head was changed"

    def test_one_step_of_a_clip_head_is_a_hundred_times_as_long(self) -> None:
        # x = (3, 4) / 5 makes logits 60, 80: class 1 has all of p, and the teacher wants class 0.
        weight = 100 * torch.eye(2)
        evidence = Evidence(head_of(weight, normalise=True), support_of([[3.0, 4.0]]), torch.tensor([[80.0, 0.0]]))
        aligned = AlignedC("paper", epochs=1).build(evidence)
        assert aligned.normalise
        assert aligned.output.bias is None
        moved = 100 * 5e-4 * torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
        torch.testing.assert_close(aligned.output.weight, weight + moved)

    @pytest.mark.parametrize("recipe", ["paper", "tuned"])
    def test_what_a_head_can_say_is_learned(self, recipe: Any) -> None:
        # One-hot inputs: row i of the teacher can be matched exactly by column i of the weight.
        teacher = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 3.0]])
        head = head_of(torch.zeros(3, 3), torch.zeros(3))
        evidence = Evidence(head, support_of(torch.eye(3)), teacher)
        aligned = AlignedC(recipe, epochs=2000, lr=1e-2).build(evidence)
        torch.testing.assert_close(aligned(torch.eye(3)).softmax(1), teacher.softmax(1), atol=2e-3, rtol=0)

    @pytest.mark.parametrize("normalise", [False, True])
    def test_a_planted_rotation_costs_nothing(self, normalise: bool) -> None:
        d, n = 24, 1500
        centres = 1.2 * random(3, d)
        labels = torch.arange(n) % 3
        expert = centres[labels] + random(n, d, seed=1) + 0.5
        merged = expert @ rotation(d, angle=2.5, seed=2)
        head = head_of(4 * normalize(centres, dim=1) * (5 if normalise else 1), torch.zeros(3), normalise=normalise)
        teacher, test = head(expert), slice(1000, None)
        aligned = AlignedC().build(Evidence(head, support_of(merged[:1000]), teacher[:1000]))
        best = accuracy(predictions(teacher[test]), labels[test])
        assert best > 0.95
        assert accuracy(predict(head, merged[test]), labels[test]) < best - 0.2
        assert accuracy(predict(aligned, merged[test]), labels[test]) > best - 0.01
        assert divergence(teacher[test], aligned(merged[test])) < 0.05 * divergence(teacher[test], head(merged[test]))

    def evidence(self, *, seed: int = 0, **more: Any) -> Evidence:
        weight, bias = random(3, 8), random(3, seed=1)
        features = random(200, 8, seed=2) + 3
        return Evidence(head_of(weight, bias, **more), support_of(features), random(200, 3, seed=3), seed)

    @pytest.mark.parametrize("recipe", ["paper", "tuned"])
    def test_the_divergence_falls(self, recipe: Any) -> None:
        evidence = self.evidence()
        assert evidence.support is not None
        assert evidence.teacher is not None
        before = divergence(evidence.teacher, evidence.head(evidence.support.values))
        assert divergence(evidence.teacher, AlignedC(recipe).build(evidence)(evidence.support.values)) < before

    def test_the_seed_decides(self) -> None:
        one, again, other = (AlignedC().build(self.evidence(seed=seed)).output.weight for seed in (0, 0, 1))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)

    def test_unit_and_origin_of_the_features_do_not_matter(self) -> None:
        evidence = self.evidence()
        head, support = evidence.head, evidence.support
        assert support is not None
        assert head.output.bias is not None
        expected = AlignedC().build(evidence)(support.values)
        unit, origin = 40.0, 7.0
        moved = support.values * unit + origin
        weight = head.output.weight / unit
        same = head_of(weight, head.output.bias - weight.sum(1) * origin)
        aligned = AlignedC().build(Evidence(same, support_of(moved), evidence.teacher))
        torch.testing.assert_close(aligned(moved), expected, atol=1e-2, rtol=0)

    def test_agreement_is_kept(self) -> None:
        evidence = self.evidence()
        assert evidence.support is not None
        teacher = evidence.head(evidence.support.values)
        aligned = AlignedC().build(Evidence(evidence.head, evidence.support, teacher))
        assert divergence(teacher, aligned(evidence.support.values)) < 1e-6

    @pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
    def test_a_hidden_layer_is_trained_too(self, activation: Any) -> None:
        hidden = Linear(random(5, 8, seed=4) / 3, random(5, seed=5))
        head = head_of(random(3, 5), random(3, seed=1), hidden=hidden, activation=activation)
        evidence = Evidence(head, support_of(random(1, 8, seed=2)), random(1, 3, seed=3))
        aligned = AlignedC("paper", epochs=1).build(evidence)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in head.tensors().items()}
        student = Head(
            Linear(leaves["weight"], leaves["bias"]),
            head.labels,
            Linear(leaves["hidden.weight"], leaves["hidden.bias"]),
            activation,
        )
        assert evidence.support is not None
        assert evidence.teacher is not None
        q = evidence.teacher.softmax(1)
        (-(q * student(evidence.support.values).log_softmax(1)).sum()).backward()  # type: ignore[no-untyped-call]
        for name, tensor in aligned.tensors().items():
            gradient = leaves[name].grad
            assert gradient is not None
            expected = head.tensors()[name] - 5e-4 * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)

    def test_hidden_layers_converge_without_a_bias_as_well(self) -> None:
        head = head_of(random(3, 5), hidden=Linear(random(5, 8, seed=4) / 3), activation="tanh")
        evidence = Evidence(head, self.evidence().support, random(200, 3, seed=3))
        assert evidence.support is not None
        assert evidence.teacher is not None
        aligned = AlignedC().build(evidence)
        assert set(aligned.tensors()) == {"weight", "hidden.weight"}
        before = divergence(evidence.teacher, head(evidence.support.values))
        assert divergence(evidence.teacher, aligned(evidence.support.values)) < 0.7 * before

    @pytest.mark.parametrize(("count", "steps"), [(1, 60), (64, 60), (65, 120), (100_000, 3000)])
    def test_steps(self, count: int, steps: int) -> None:
        assert AlignedC().schedule.steps(count) == steps

    def test_options_override_the_recipe(self) -> None:
        assert AlignedC("paper").schedule == Schedule(5, 5e-4, 1, None, False)
        assert AlignedC("paper").schedule.steps(385) == 1925
        assert AlignedC("tuned", 1, 0.1, 2, 3).schedule == Schedule(1, 0.1, 2, 3, True)

    def test_inputs_that_are_all_the_same(self) -> None:
        head = head_of(torch.eye(3), torch.zeros(3))
        teacher = torch.tensor([[0.0, 3.0, 0.0]]).repeat(4, 1)
        support = support_of([[1.0, 0.0, 0.0]] * 4)
        aligned = AlignedC(epochs=1000).build(Evidence(head, support, teacher))
        assert predict(aligned, support.values).tolist() == [1] * 4

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"recipe": "papper"}, r"'recipe' must be 'paper' or 'tuned', got 'papper'; did you mean 'paper'\?"),
            ({"epochs": 0}, "'epochs' must be at least 1, got 0"),
            ({"batch": 0}, "'batch' must be at least 1, got 0"),
            ({"most": 0}, "'most' must be at least 1, got 0"),
            ({"lr": 0.0}, r"'lr' must be in \(0, 1\], got 0.0"),
            ({"lr": math.nan}, r"'lr' must be in \(0, 1\], got nan"),
        ],
    )
    def test_options_that_make_no_sense(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(RecipeError, match=message):
            AlignedC(**options)

    def test_divergence_is_an_error(self) -> None:
        evidence = Evidence(head_of(torch.full((3, 8), 3e38)), support_of(torch.ones(2, 8)), torch.ones(2, 3))
        with pytest.raises(NumericalError, match="the head of 'toy' diverged under aligned-c: it is no longer finite"):
            AlignedC().build(evidence)


class TestProbe:
    def test_the_optimum_by_hand(self) -> None:
        # Features 3 and 7, standardised -1 and 1. By symmetry V = (-v, v), c = 0, and the loss log(1 + exp(-2 v)) +
        # l2 v^2 is least where 2 / (1 + exp(2 v)) = 2 l2 v.
        low, high = 0.0, 10.0
        for _ in range(100):
            v = (low + high) / 2
            low, high = (v, high) if 1 / (1 + math.exp(2 * v)) > 0.01 * v else (low, v)
        evidence = Evidence(head_of(torch.zeros(2, 1)), support_of([[3.0], [7.0], [3.0], [7.0]], [0, 1, 0, 1]))
        probe = Probe(l2=0.01).build(evidence)
        torch.testing.assert_close(probe.output.weight, torch.tensor([[-v], [v]]) / 2, rtol=1e-4, atol=0)
        torch.testing.assert_close(
            probe(torch.tensor([[3.0], [5.0], [7.0]])), torch.tensor([[v, -v], [0, 0], [-v, v]]), rtol=1e-4, atol=1e-4
        )

    def test_separable_classes_are_separated_and_the_gradient_is_zero(self) -> None:
        labels = torch.arange(300) % 3
        features = (6 * torch.eye(3, 10))[labels] + random(300, 10) * torch.logspace(-2, 0, 10) + 50
        features[:, 9] = 4  # constant: nothing to learn from, nothing to divide by
        probe = Probe(l2=1e-2).build(Evidence(head_of(torch.zeros(3, 10)), support_of(features, labels)))
        assert accuracy(predict(probe, features), labels) == 1
        sigma = features.double().std(0, correction=0)
        sigma[9] = 1
        V = probe.output.weight.double() * sigma
        error = probe(features).double().softmax(1) - torch.eye(3, dtype=torch.float64)[labels]
        gradient = error.T @ ((features.double() - features.double().mean(0)) / sigma) / 300 + 1e-2 * V
        assert gradient.abs().max() < 1e-4
        assert error.mean(0).abs().max() < 1e-4

    def test_a_class_without_support_is_never_predicted(self) -> None:
        probe = Probe().build(Evidence(head_of(torch.zeros(3, 1)), support_of([[0.0], [1.0]], [0, 2])))
        assert probe(torch.zeros(1, 1))[0, 1] == -math.inf
        assert predict(probe, torch.tensor([[0.0], [1.0]])).tolist() == [0, 2]

    def test_one_class_alone(self) -> None:
        probe = Probe().build(Evidence(head_of(torch.zeros(3, 1)), support_of([[0.0], [1.0]], [1, 1])))
        assert predict(probe, torch.tensor([[0.0], [9.0]])).tolist() == [1, 1]

    @pytest.mark.parametrize("l2", [0.0, -1.0, math.inf])
    def test_no_penalty_no_optimum(self, l2: float) -> None:
        with pytest.raises(RecipeError, match=f"'l2' must be a positive number, got {l2}"):
            Probe(l2=l2)

    def test_no_steps(self) -> None:
        with pytest.raises(RecipeError, match="'steps' must be at least 1, got 0"):
            Probe(steps=0)


GOOD = {"values": torch.ones(4, 2), "labels": [0, 1, 2, 0]}


@pytest.mark.parametrize(
    ("name", "evidence", "error", "message"),
    [
        ("knn", {"support": None}, RecipeError, "'knn' needs features of support inputs, got none"),
        ("aligned-c", {"support": None}, RecipeError, "'aligned-c' needs features of support inputs, got none"),
        (
            "probe",
            {"values": torch.ones(0, 2), "labels": []},
            RecipeError,
            "at least one support input of 'toy', got 0",
        ),
        ("knn", {"labels": None}, RecipeError, "'knn' needs labels of its support inputs of 'toy', got none"),
        ("probe", {"labels": [0, 1, 3, 0]}, IncompatibleError, r"labels of 'toy' must be in 0\.\.2, got 0\.\.3"),
        ("knn", {"labels": [0, 1, -1, 0]}, IncompatibleError, r"labels of 'toy' must be in 0\.\.2, got -1\.\.1"),
        (
            "aligned-c",
            {},
            RecipeError,
            "'aligned-c' needs the expert's logits on its support inputs of 'toy', got none",
        ),
        ("aligned-c", {"teacher": torch.ones(4, 2)}, IncompatibleError, r"must be \(4, 3\), got \(4, 2\)"),
        ("aligned-c", {"teacher": torch.full((4, 3), math.inf)}, NumericalError, "logits on 'toy' are not all finite"),
        ("knn", {"values": torch.full((4, 2), math.nan)}, NumericalError, "4 of 4 support features of 'toy' are NaN"),
        ("probe", {"values": torch.ones(4, 5)}, IncompatibleError, "'toy' reads 2 features but the support has 5"),
    ],
)
def test_evidence_that_is_not_enough(
    name: str, evidence: dict[str, Any], error: type[OrthomergeError], message: str
) -> None:
    given = GOOD | evidence
    support = None if "support" in evidence else support_of(given["values"], given["labels"])
    with pytest.raises(error, match=message):
        make_protocol(name).build(Evidence(head_of(torch.ones(3, 2)), support, evidence.get("teacher")))


class TestTable:
    @pytest.mark.parametrize("name", PROTOCOLS)
    def test_rows_tell_the_truth(self, name: str) -> None:
        row = find_protocol(name)
        protocol = make_protocol(name)
        assert row.name == name
        assert type(protocol) is protocol_class(row)
        assert row.needs == protocol.needs
        assert row.title
        assert row.reference

    @pytest.mark.parametrize("name", PROTOCOLS)
    def test_contract(self, name: str) -> None:
        """Evidence is not changed, the labels are the head's, and the same evidence gives the same logits."""
        head = head_of(random(3, 4), random(3, seed=1))
        values, labels, teacher = random(30, 4, seed=2), torch.arange(30) % 3, random(30, 3, seed=3)
        tensors = [*head.tensors().values(), values, labels, teacher]
        before = [tensor.clone() for tensor in tensors]
        evidence = Evidence(head, support_of(values, labels), teacher, seed=5)
        one, two = (make_protocol(name).build(evidence) for _ in range(2))
        assert one.labels == head.labels
        assert torch.equal(one(values), two(values))
        assert one(values).shape == (30, 3)
        assert all(map(torch.equal, tensors, before))

    def test_options_are_strict(self) -> None:
        assert make_protocol("aligned-c", {"recipe": "paper", "lr": 1}) == AlignedC("paper", lr=1.0)
        with pytest.raises(RecipeError, match=r"protocol aligned-c: unknown option 'epoch'; did you mean 'epochs'\?"):
            make_protocol("aligned-c", {"epoch": 3})
        with pytest.raises(RecipeError, match=r"protocol current: unknown option 'k'"):
            make_protocol("current", {"k": 3})

    def test_an_unknown_name_offers_the_nearest(self) -> None:
        with pytest.raises(RecipeError, match=r"unknown protocol 'aligned_c'; did you mean 'aligned-c'\?"):
            find_protocol("aligned_c")

    def test_plug_ins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = {"x:mine": Row("mine", "x:Mine", "Mine", "me"), "x:knn": Row("knn", "x:Knn", "Taken", "me")}

        def install(value: str) -> None:
            protocols.protocols.cache_clear()
            monkeypatch.setattr(EntryPoint, "load", lambda entry: rows[entry.value])
            entry = EntryPoint("name", value, "orthomerge.protocols")
            monkeypatch.setattr("orthomerge.rows.entry_points", lambda group: [entry])

        install("x:mine")
        assert find_protocol("mine").title == "Mine"
        install("x:knn")
        with pytest.raises(RecipeError, match="the plug-in 'x:knn' must be a Row with a name of its own"):
            find_protocol("mine")
        protocols.protocols.cache_clear()
