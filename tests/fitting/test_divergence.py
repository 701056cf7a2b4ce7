"""Experts' outputs as targets: all heads at once as one by one, torch's own KL, nothing for the expert itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.fitting.making import CLASSES, WIDTH, all_features, first_numbers, make_setting
from torch.nn.functional import kl_div, log_softmax

from orthomerge.fitting.divergence import Divergence
from orthomerge.fitting.inputs import Targets
from orthomerge.fitting.kinds import Setting
from orthomerge.models.heads import Head, Linear


def hidden(head: Head, seed: int = 0) -> Head:
    random = torch.Generator().manual_seed(seed)
    layer = Linear(0.3 * torch.randn(WIDTH, WIDTH, generator=random), torch.randn(WIDTH, generator=random))
    return replace(head, hidden=layer, activation="tanh")


def normal(head: Head) -> Head:
    return replace(head, output=Linear(10 * head.output.weight), normalise=True)


def variant(setting: Setting, name: str) -> dict[str, Head]:
    heads = dict(setting.heads)
    if name == "hidden":
        heads["three"] = hidden(heads["three"])
    elif name == "normalise":
        heads["two"] = normal(heads["two"])
    elif name == "no bias":
        heads = {task: replace(head, output=Linear(head.output.weight)) for task, head in heads.items()}
    return heads


def features_of(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)), first_numbers(setting, 5)


@pytest.mark.parametrize("name", ["plain", "hidden", "normalise", "no bias"])
@pytest.mark.parametrize("lr", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_all_heads_at_once_are_the_heads_one_by_one(name: str, lr: float, temperature: float) -> None:
    setting = make_setting("bert", inputs=6)
    heads = variant(setting, name)
    objective = Divergence(heads, setting.heads, setting.inputs, lr=lr, temperature=temperature)
    features, numbers = features_of(setting)
    logits = objective._logits(features)
    assert logits.shape == (3, 5, 5)
    expected = 0.0
    for number, (task, head) in enumerate(heads.items()):
        torch.testing.assert_close(logits[number, :, : CLASSES[task]].detach(), head(features[number]))
        targets = setting.inputs.targets[task].at(slice(5))
        target = log_softmax(setting.heads[task](targets.features) / temperature, 1)
        mine = log_softmax(head(features[number]) / temperature, 1)
        found = kl_div(mine, target, reduction="none", log_target=True).sum(1)
        torch.testing.assert_close(objective.judge(features[number], targets, task).detach(), found)
        expected += float(kl_div(mine, target, reduction="batchmean", log_target=True))
    assert objective.loss(features, numbers).item() == pytest.approx(expected, rel=1e-5)
    assert objective.penalty() is None


def test_nothing_between_an_expert_and_itself() -> None:
    setting = make_setting("vit", inputs=6)
    objective = Divergence(setting.heads, setting.heads, setting.inputs)
    numbers = first_numbers(setting, 6)
    features = all_features(setting)[numbers].requires_grad_(True)
    loss = objective.loss(features, numbers)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert float(features.grad.abs().max()) < 1e-6


def test_heads_that_stay_are_given_back_themselves() -> None:
    setting = make_setting("bert", inputs=6)
    half = {t: h.with_tensors({n: x.bfloat16() for n, x in h.tensors().items()}) for t, h in setting.heads.items()}
    objective = Divergence(half, half, setting.inputs)
    assert objective.parameters == []
    assert all(objective.classifiers()[task] is head for task, head in half.items())
    other = variant(setting, "hidden")
    objective.use(other)
    assert all(objective.classifiers()[task] is head for task, head in other.items())
    features, _ = features_of(setting)
    torch.testing.assert_close(objective._logits(features)[1, :, :3], other["three"](features[1]))


@pytest.mark.parametrize("name", ["plain", "hidden", "normalise"])
def test_trained_heads_move_in_their_own_dtype_and_the_given_ones_do_not(name: str) -> None:
    setting = make_setting("bert", inputs=6)
    given = {
        task: head.with_tensors({n: x.bfloat16() for n, x in head.tensors().items()})
        for task, head in variant(setting, name).items()
    }
    before = {task: {n: x.clone() for n, x in head.tensors().items()} for task, head in given.items()}
    objective = Divergence(given, given, setting.inputs, lr=0.1)
    assert len(objective.parameters) == sum(len(head.tensors()) for head in given.values())
    features, numbers = features_of(setting)
    optimiser = torch.optim.Adam(objective.parameters, lr=0.1)
    first = objective.loss(features, numbers).item()
    for _ in range(5):
        optimiser.zero_grad()
        loss = objective.loss(features, numbers)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert objective.loss(features, numbers).item() < first
    for task, head in objective.classifiers().items():
        assert isinstance(head, Head)
        for key, tensor in head.tensors().items():
            assert tensor.dtype == torch.bfloat16
            assert not tensor.requires_grad
            assert not torch.equal(tensor, before[task][key])
            assert torch.equal(given[task].tensors()[key], before[task][key])


def test_held_out_targets_are_compared_with_what_their_own_expert_makes_of_them() -> None:
    setting, other = make_setting("bert", inputs=6), make_setting("bert", inputs=8, seed=3)
    objective = Divergence(setting.heads, setting.heads, setting.inputs)
    targets, head = other.inputs.targets["five"], setting.heads["five"]
    features = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    target, found = (head(each).log_softmax(1) for each in (targets.features, features))
    expected = kl_div(found, target, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(objective.judge(features, targets, "five"), expected)


def test_an_input_of_two_tasks_counts_in_both_by_its_weights() -> None:
    """Two heads of one feature, one input: logits and weights by hand."""
    inputs = make_setting("bert", inputs=1).inputs
    row = torch.tensor([0])
    inputs = inputs.with_targets(
        {
            "a": Targets(row, torch.tensor([[math.log(3.0)]]), torch.tensor([1.0])),
            "b": Targets(row, torch.tensor([[0.0]]), torch.tensor([0.3])),
        }
    )
    heads = {
        "a": Head(Linear(torch.tensor([[1.0], [0.0]])), ("yes", "no")),
        "b": Head(Linear(torch.tensor([[0.0], [2.0], [0.0]])), ("x", "y", "z")),
    }
    objective = Divergence(heads, heads, inputs)
    # Expert a: 3/4, 1/4. Expert b: thirds. The student's feature is log 2: 2/3, 1/3 under a; 1/6, 4/6, 1/6 under b.
    features = torch.full((2, 1, 1), math.log(2.0))
    a = 0.75 * math.log(0.75 / (2 / 3)) + 0.25 * math.log(0.25 / (1 / 3))
    b = (2 * math.log((1 / 3) / (1 / 6)) + math.log((1 / 3) / (4 / 6))) / 3
    numbers = torch.tensor([[0], [1]])
    assert objective.loss(features, numbers).item() == pytest.approx(1.0 * a + 0.3 * b, rel=1e-5)
    assert objective.judge(features[1], inputs.targets["b"], "b").tolist() == pytest.approx([b], rel=1e-5)
    swapped = {
        task: replace(t, weights=torch.tensor([2.0 if task == "b" else 0.0])) for task, t in inputs.targets.items()
    }
    again = Divergence(heads, heads, inputs.with_targets(swapped))
    assert again.loss(features, numbers).item() == pytest.approx(2.0 * b, rel=1e-5)
