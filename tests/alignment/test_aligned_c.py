"""Aligned-c on toys whose answers are worked out by hand, and from a pair of features."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.alignment.planted import divergence, head_in
from torch.nn.functional import normalize

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.descent import Descent
from orthomerge.core.errors import NumericalError
from orthomerge.evaluation.metrics import counted, predict
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.toys import head_of, linear_head, pair_of, random, rotation

recipes = pytest.mark.parametrize("recipe", ["paper", "tuned"])


@dataclass(frozen=True)
class Case:
    """Merged features [n, d], the expert's logits [n, C] on the same inputs, and a head to start from."""

    head: Head
    values: torch.Tensor
    teacher: torch.Tensor

    def distilled(self, aligner: AlignedC) -> Head:
        return aligner.distil(self.values, self.teacher, self.head, task="toy")

    def divergences(self, aligned: Head) -> tuple[float, float]:
        """From the teacher, by the head before and after."""
        return divergence(self.teacher, self.head(self.values)), divergence(self.teacher, aligned(self.values))


CASE = Case(linear_head(random(3, 8), random(3, seed=1)), random(200, 8, seed=2) + 3, random(200, 3, seed=3))


def test_facts_and_a_planted_rotation() -> None:
    expert, head = random(300, 6), head_of("plain")
    merged = expert @ rotation(6)
    found = AlignedC().fit(pair_of(merged, expert), head)
    assert found.facts["loss_before"] == pytest.approx(divergence(head(expert), head(merged)), rel=1e-4)
    assert found.facts["loss"] == pytest.approx(divergence(head(expert), found.classifier(merged)), rel=1e-2)
    assert float(found.facts["loss"]) < 0.01 * float(found.facts["loss_before"])
    assert found.facts["steps"] == 300


def test_a_head_of_half_precision_is_trained_in_float32() -> None:
    half = Head(Linear(head_of("plain").output.weight.bfloat16()), head_of("plain").labels)
    found = AlignedC(epochs=1).fit(pair_of(random(9, 6), random(9, 6, seed=1)), half).classifier
    assert head_in(found).output.weight.dtype == torch.float32


def test_one_step_by_hand() -> None:
    # p = (1/3, 1/3, 1/3), teacher (1/2, 1/4, 1/4): p - q = (-1/6, 1/12, 1/12); times x = (2, -1) the gradient has
    # the signs below, and Adam's first step is lr against the sign.
    head = linear_head(torch.zeros(3, 2), torch.zeros(3))
    case = Case(head, torch.tensor([[2.0, -1.0]]), torch.tensor([[math.log(2), 0.0, 0.0]]))
    made = case.distilled(AlignedC("paper", epochs=1)).tensors()
    signs = {"weight": torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, 1.0]]), "bias": torch.tensor([1.0, -1.0, -1.0])}
    torch.testing.assert_close(made, {name: 5e-4 * sign for name, sign in signs.items()}, rtol=1e-5, atol=0)
    assert not head.output.weight.any(), "the expert's head was changed"


def test_one_step_of_a_clip_head_is_a_hundred_times_as_long() -> None:
    # x = (3, 4) / 5 makes logits 60, 80: class 1 has all of p, and the teacher wants class 0.
    weight = 100 * torch.eye(2)
    case = Case(linear_head(weight, normalise=True), torch.tensor([[3.0, 4.0]]), torch.tensor([[80.0, 0.0]]))
    aligned = case.distilled(AlignedC("paper", epochs=1))
    assert aligned.normalise
    assert aligned.output.bias is None
    moved = 100 * 5e-4 * torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    torch.testing.assert_close(aligned.output.weight, weight + moved)


@recipes
def test_what_a_head_can_say_is_learned(recipe: Any) -> None:
    # One-hot inputs: row i of the teacher can be matched exactly by column i of the weight.
    teacher = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 3.0]])
    case = Case(linear_head(torch.zeros(3, 3), torch.zeros(3)), torch.eye(3), teacher)
    aligned = case.distilled(AlignedC(recipe, epochs=2000, lr=1e-2))
    torch.testing.assert_close(aligned(torch.eye(3)).softmax(1), teacher.softmax(1), atol=2e-3, rtol=0)
    before, after = CASE.divergences(CASE.distilled(AlignedC(recipe)))
    assert after < before


@pytest.mark.parametrize("normalise", [False, True])
def test_a_planted_rotation_costs_nothing(normalise: bool) -> None:
    d, n = 24, 1500
    centres = 1.2 * random(3, d)
    labels = torch.arange(n) % 3
    expert = centres[labels] + random(n, d, seed=1) + 0.5
    merged = expert @ rotation(d, angle=2.5, seed=2)
    head = linear_head(4 * normalize(centres, dim=1) * (5 if normalise else 1), torch.zeros(3), normalise=normalise)
    teacher, test = head(expert), slice(1000, None)
    aligned = Case(head, merged[:1000], teacher[:1000]).distilled(AlignedC())
    best, unaligned, made = (
        counted(answers, labels[test]).value
        for answers in (teacher[test].argmax(1), predict(head, merged[test]), predict(aligned, merged[test]))
    )
    assert best > 0.95
    assert unaligned < best - 0.2
    assert made > best - 0.01
    assert divergence(teacher[test], aligned(merged[test])) < 0.05 * divergence(teacher[test], head(merged[test]))


def test_unit_and_origin_of_the_features_do_not_matter() -> None:
    head, unit, origin = CASE.head, 40.0, 7.0
    assert head.output.bias is not None
    moved, weight = CASE.values * unit + origin, head.output.weight / unit
    same = linear_head(weight, head.output.bias - weight.sum(1) * origin)
    aligned = Case(same, moved, CASE.teacher).distilled(AlignedC())
    torch.testing.assert_close(aligned(moved), CASE.distilled(AlignedC())(CASE.values), atol=1e-2, rtol=0)


def test_agreement_is_kept() -> None:
    agreed = Case(CASE.head, CASE.values, CASE.head(CASE.values))
    assert agreed.divergences(agreed.distilled(AlignedC()))[1] < 1e-6


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
def test_a_hidden_layer_is_trained_too(activation: Any) -> None:
    hidden = Linear(random(5, 8, seed=4) / 3, random(5, seed=5))
    head = Head(Linear(random(3, 5), random(3, seed=1)), ("a", "b", "c"), hidden, activation)
    case = Case(head, random(1, 8, seed=2), random(1, 3, seed=3))
    aligned = case.distilled(AlignedC("paper", epochs=1))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in head.tensors().items()}
    student = head.with_tensors(leaves)
    (-(case.teacher.softmax(1) * student(case.values).log_softmax(1)).sum()).backward()  # type: ignore[no-untyped-call]
    for name, tensor in aligned.tensors().items():
        gradient = leaves[name].grad
        assert gradient is not None
        expected = head.tensors()[name] - 5e-4 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)


def test_hidden_layers_converge_without_a_bias_as_well() -> None:
    head = Head(Linear(random(3, 5)), ("a", "b", "c"), Linear(random(5, 8, seed=4) / 3), "tanh")
    case = Case(head, CASE.values, CASE.teacher)
    aligned = case.distilled(AlignedC())
    assert set(aligned.tensors()) == {"weight", "hidden.weight"}
    before, after = case.divergences(aligned)
    assert after < 0.7 * before


def test_steps_and_options_that_override_the_recipe() -> None:
    assert [AlignedC().descent(count).steps for count in (1, 64, 65, 100_000)] == [60, 60, 120, 3000]
    assert AlignedC("paper").descent(385) == Descent(1925, 5e-4, 1, False, 0)
    assert AlignedC("tuned", 1, 0.1, 2, 3, 4).descent(4) == Descent(2, 0.1, 2, True, 4)
    assert AlignedC("tuned", 1, 0.1, 2, 3).descent(8) == Descent(3, 0.1, 2, True, 0)


def test_inputs_that_are_all_the_same() -> None:
    support = torch.tensor([[1.0, 0.0, 0.0]] * 4)
    case = Case(linear_head(torch.eye(3), torch.zeros(3)), support, torch.tensor([[0.0, 3.0, 0.0]] * 4))
    assert predict(case.distilled(AlignedC(epochs=1000)), support).tolist() == [1] * 4


def test_divergence_is_an_error() -> None:
    case = Case(linear_head(torch.full((3, 8), 3e38)), torch.ones(2, 8), torch.ones(2, 3))
    with pytest.raises(NumericalError, match="the head of 'toy' diverged under aligned-c: it is no longer finite"):
        case.distilled(AlignedC())


def test_a_shuffled_teacher_teaches_nothing() -> None:
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
    taught, spoilt = (Case(head, values, each).distilled(AlignedC()) for each in (teacher, shuffled))
    assert counted(predict(taught, test), truth).value > 0.98
    sure, unsure = (float(each(test).softmax(1).amax(1).mean()) for each in (taught, spoilt))
    assert sure > 0.9
    assert unsure < 0.45  # of three classes: next to nothing is said
