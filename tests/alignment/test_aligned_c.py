"""Aligned-c on toys whose answers are worked out by hand, and from a pair of features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.alignment.toys import divergence
from torch.nn.functional import normalize

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.descent import Descent
from orthomerge.alignment.problem import Problem
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.evaluation.metrics import counted, predict
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random, rotation


@dataclass(frozen=True)
class Case:
    """Merged features [n, d], the expert's logits [n, C] on the same inputs, and a head to start from."""

    head: Head
    values: torch.Tensor
    teacher: torch.Tensor


def distilled(aligner: AlignedC, case: Case) -> Head:
    return aligner.distil(case.values, case.teacher, case.head, task="toy")


@pytest.mark.parametrize("recipe", ["paper", "tuned"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_pair_of_features_is_distilled(recipe: Any, kind: str) -> None:
    pair, head = pair_of(random(30, 6) + 1, random(30, 6, seed=1)), head_of(kind)
    aligner = AlignedC(recipe, epochs=2, seed=5)
    expected = aligner.distil(pair.merged.values, Problem.of(pair, head).Z, head, task="toy")
    found = aligner.fit(pair, head).classifier
    assert isinstance(found, Head)
    assert found.tensors().keys() == expected.tensors().keys() == head.tensors().keys()
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in found.tensors().items())


def test_facts_and_a_planted_rotation() -> None:
    expert, head = random(300, 6), head_of("plain")
    merged = expert @ rotation(6)
    found = AlignedC().fit(pair_of(merged, expert), head)
    assert found.facts["loss_before"] == pytest.approx(divergence(head(expert), head(merged)), rel=1e-4)
    assert found.facts["loss"] == pytest.approx(divergence(head(expert), found.classifier(merged)), rel=1e-2)
    assert float(found.facts["loss"]) < 0.01 * float(found.facts["loss_before"])
    assert found.facts["steps"] == 300


def test_a_head_of_half_precision_is_trained_in_float32() -> None:
    head = head_of("plain")
    half = Head(type(head.output)(head.output.weight.bfloat16(), None), head.labels)
    found = AlignedC(epochs=1).fit(pair_of(random(9, 6), random(9, 6, seed=1)), half).classifier
    assert isinstance(found, Head)
    assert found.output.weight.dtype == torch.float32


class TestDistillation:
    def test_one_step_by_hand(self) -> None:
        # p = (1/3, 1/3, 1/3), teacher (1/2, 1/4, 1/4): p - q = (-1/6, 1/12, 1/12); times x = (2, -1) the gradient has
        # the signs below, and Adam's first step is lr against the sign.
        head = linear_head(torch.zeros(3, 2), torch.zeros(3))
        case = Case(head, torch.tensor([[2.0, -1.0]]), torch.tensor([[math.log(2), 0.0, 0.0]]))
        aligned = distilled(AlignedC("paper", epochs=1), case)
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
        case = Case(linear_head(weight, normalise=True), torch.tensor([[3.0, 4.0]]), torch.tensor([[80.0, 0.0]]))
        aligned = distilled(AlignedC("paper", epochs=1), case)
        assert aligned.normalise
        assert aligned.output.bias is None
        moved = 100 * 5e-4 * torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
        torch.testing.assert_close(aligned.output.weight, weight + moved)

    @pytest.mark.parametrize("recipe", ["paper", "tuned"])
    def test_what_a_head_can_say_is_learned(self, recipe: Any) -> None:
        # One-hot inputs: row i of the teacher can be matched exactly by column i of the weight.
        teacher = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 3.0]])
        head = linear_head(torch.zeros(3, 3), torch.zeros(3))
        case = Case(head, torch.eye(3), teacher)
        aligned = distilled(AlignedC(recipe, epochs=2000, lr=1e-2), case)
        torch.testing.assert_close(aligned(torch.eye(3)).softmax(1), teacher.softmax(1), atol=2e-3, rtol=0)

    @pytest.mark.parametrize("normalise", [False, True])
    def test_a_planted_rotation_costs_nothing(self, normalise: bool) -> None:
        d, n = 24, 1500
        centres = 1.2 * random(3, d)
        labels = torch.arange(n) % 3
        expert = centres[labels] + random(n, d, seed=1) + 0.5
        merged = expert @ rotation(d, angle=2.5, seed=2)
        head = linear_head(4 * normalize(centres, dim=1) * (5 if normalise else 1), torch.zeros(3), normalise=normalise)
        teacher, test = head(expert), slice(1000, None)
        aligned = distilled(AlignedC(), Case(head, merged[:1000], teacher[:1000]))
        best = counted(teacher[test].argmax(1), labels[test]).value
        assert best > 0.95
        assert counted(predict(head, merged[test]), labels[test]).value < best - 0.2
        assert counted(predict(aligned, merged[test]), labels[test]).value > best - 0.01
        assert divergence(teacher[test], aligned(merged[test])) < 0.05 * divergence(teacher[test], head(merged[test]))

    def case(self) -> Case:
        head = linear_head(random(3, 8), random(3, seed=1))
        return Case(head, random(200, 8, seed=2) + 3, random(200, 3, seed=3))

    @pytest.mark.parametrize("recipe", ["paper", "tuned"])
    def test_the_divergence_falls(self, recipe: Any) -> None:
        case = self.case()
        before = divergence(case.teacher, case.head(case.values))
        assert divergence(case.teacher, distilled(AlignedC(recipe), case)(case.values)) < before

    def test_the_seed_decides(self) -> None:
        one, again, other = (distilled(AlignedC(seed=seed), self.case()).output.weight for seed in (0, 0, 1))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)

    def test_unit_and_origin_of_the_features_do_not_matter(self) -> None:
        case = self.case()
        head, support = case.head, case.values
        assert head.output.bias is not None
        expected = distilled(AlignedC(), case)(support)
        unit, origin = 40.0, 7.0
        moved = support * unit + origin
        weight = head.output.weight / unit
        same = linear_head(weight, head.output.bias - weight.sum(1) * origin)
        aligned = distilled(AlignedC(), Case(same, moved, case.teacher))
        torch.testing.assert_close(aligned(moved), expected, atol=1e-2, rtol=0)

    def test_agreement_is_kept(self) -> None:
        case = self.case()
        teacher = case.head(case.values)
        aligned = distilled(AlignedC(), Case(case.head, case.values, teacher))
        assert divergence(teacher, aligned(case.values)) < 1e-6

    @pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
    def test_a_hidden_layer_is_trained_too(self, activation: Any) -> None:
        hidden = Linear(random(5, 8, seed=4) / 3, random(5, seed=5))
        head = Head(Linear(random(3, 5), random(3, seed=1)), ("a", "b", "c"), hidden, activation)
        case = Case(head, random(1, 8, seed=2), random(1, 3, seed=3))
        aligned = distilled(AlignedC("paper", epochs=1), case)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in head.tensors().items()}
        student = Head(
            Linear(leaves["weight"], leaves["bias"]),
            head.labels,
            Linear(leaves["hidden.weight"], leaves["hidden.bias"]),
            activation,
        )
        q = case.teacher.softmax(1)
        (-(q * student(case.values).log_softmax(1)).sum()).backward()  # type: ignore[no-untyped-call]
        for name, tensor in aligned.tensors().items():
            gradient = leaves[name].grad
            assert gradient is not None
            expected = head.tensors()[name] - 5e-4 * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)

    def test_hidden_layers_converge_without_a_bias_as_well(self) -> None:
        head = Head(Linear(random(3, 5)), ("a", "b", "c"), Linear(random(5, 8, seed=4) / 3), "tanh")
        case = Case(head, self.case().values, random(200, 3, seed=3))
        aligned = distilled(AlignedC(), case)
        assert set(aligned.tensors()) == {"weight", "hidden.weight"}
        before = divergence(case.teacher, head(case.values))
        assert divergence(case.teacher, aligned(case.values)) < 0.7 * before

    @pytest.mark.parametrize(("count", "steps"), [(1, 60), (64, 60), (65, 120), (100_000, 3000)])
    def test_steps(self, count: int, steps: int) -> None:
        assert AlignedC().descent(count).steps == steps

    def test_options_override_the_recipe(self) -> None:
        assert AlignedC("paper").descent(385) == Descent(1925, 5e-4, 1, False, 0)
        assert AlignedC("tuned", 1, 0.1, 2, 3, 4).descent(4) == Descent(2, 0.1, 2, True, 4)
        assert AlignedC("tuned", 1, 0.1, 2, 3).descent(8) == Descent(3, 0.1, 2, True, 0)

    def test_inputs_that_are_all_the_same(self) -> None:
        head = linear_head(torch.eye(3), torch.zeros(3))
        teacher = torch.tensor([[0.0, 3.0, 0.0]]).repeat(4, 1)
        support = torch.tensor([[1.0, 0.0, 0.0]] * 4)
        aligned = distilled(AlignedC(epochs=1000), Case(head, support, teacher))
        assert predict(aligned, support).tolist() == [1] * 4

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
        case = Case(linear_head(torch.full((3, 8), 3e38)), torch.ones(2, 8), torch.ones(2, 3))
        with pytest.raises(NumericalError, match="the head of 'toy' diverged under aligned-c: it is no longer finite"):
            distilled(AlignedC(), case)

    def test_a_shuffled_teacher_teaches_nothing(self) -> None:
        """What is gained comes from the expert: with its logits on the wrong inputs the head says nothing."""
        head = linear_head(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
        generator = torch.Generator().manual_seed(5)

        def clusters(count: int) -> tuple[torch.Tensor, torch.Tensor]:
            labels = torch.arange(count) % 3
            means = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])[labels]
            return means + torch.randn(count, 2, generator=generator), labels

        (values, labels), (test, truth) = clusters(300), clusters(600)
        teacher = 4 * torch.eye(3)[labels]
        shuffled = teacher[torch.randperm(300, generator=generator)]
        taught, spoilt = (distilled(AlignedC(), Case(head, values, each)) for each in (teacher, shuffled))
        assert counted(predict(taught, test), truth).value > 0.98
        sure, unsure = (float(each(test).softmax(1).amax(1).mean()) for each in (taught, spoilt))
        assert sure > 0.9
        assert unsure < 0.45  # of three classes: next to nothing is said
