"""Entropy and divergence: torch's own, by hand, weights of targets, and heads as they were or trained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.fitting.making import first_targets
from torch.nn.functional import kl_div, log_softmax

from orthomerge.fitting.objective import Divergence, Entropy
from orthomerge.fitting.setting import Setting, Targets
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.settings import CPU, WIDTH, make_setting


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


def in_half(heads: dict[str, Head]) -> dict[str, Head]:
    return {t: h.with_tensors({n: x.bfloat16() for n, x in h.tensors().items()}) for t, h in heads.items()}


def features_of(setting: Setting, scale: float = 1.0) -> dict[str, torch.Tensor]:
    features = scale * torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    return dict(zip(setting.tasks, features, strict=True))


@pytest.mark.parametrize("name", ["plain", "hidden", "normalise", "no bias"])
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_divergence_is_torchs(name: str, lr: float) -> None:
    setting = make_setting("bert", inputs=6)
    heads, targets, features = variant(setting, name), first_targets(setting, 5), features_of(setting)
    objective = Divergence(heads, setting.heads, CPU, lr=lr)
    expected = 0.0
    for task, head in heads.items():
        target = log_softmax(setting.heads[task](targets[task].features), 1)
        own = log_softmax(head(features[task]), 1)
        terms = kl_div(own, target, reduction="none", log_target=True).sum(1)
        torch.testing.assert_close(objective.terms(features[task], targets[task], task).detach(), terms)
        expected += float(terms.mean())
    assert objective.loss(features, targets).item() == pytest.approx(expected, rel=1e-5)
    assert objective.penalty() is None
    assert objective.measures() == {}


def test_nothing_between_an_expert_and_itself() -> None:
    setting = make_setting("vit", inputs=6)
    objective, targets = Divergence(setting.heads, setting.heads, CPU), setting.inputs.targets
    features = {task: some.features.clone().requires_grad_(True) for task, some in targets.items()}
    loss = objective.loss(features, targets)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(each.grad is not None and float(each.grad.abs().max()) < 1e-6 for each in features.values())


def test_heads_that_stay_are_returned_themselves() -> None:
    half = in_half(dict(make_setting("bert", inputs=6).heads))
    for objective in (Divergence(half, half, CPU), Entropy(half, CPU)):
        assert objective.parameters == []
        assert all(objective.classifiers()[task] is head for task, head in half.items())


@pytest.mark.parametrize("name", ["plain", "hidden", "normalise"])
def test_trained_heads_move_in_their_own_dtype_and_the_originals_do_not(name: str) -> None:
    setting = make_setting("bert", inputs=6)
    heads = in_half(variant(setting, name))
    before = {task: {n: x.clone() for n, x in head.tensors().items()} for task, head in heads.items()}
    objective = Divergence(heads, heads, CPU, lr=0.1)
    assert len(objective.parameters) == sum(len(head.tensors()) for head in heads.values())
    features, targets = features_of(setting), first_targets(setting, 5)
    optimiser = torch.optim.Adam(objective.parameters, lr=0.1)
    first = objective.loss(features, targets).item()
    for _ in range(5):
        optimiser.zero_grad()
        loss = objective.loss(features, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert objective.loss(features, targets).item() < first
    for task, head in objective.classifiers().items():
        for key, tensor in head.tensors().items():
            assert tensor.dtype == torch.bfloat16
            assert not tensor.requires_grad
            assert not torch.equal(tensor, before[task][key])
            assert torch.equal(heads[task].tensors()[key], before[task][key])


def test_an_input_of_two_tasks_counts_in_both_by_its_weights() -> None:
    """Two heads of one feature, one input: logits and weights by hand."""
    row = torch.tensor([0])
    targets = {
        "a": Targets(row, torch.tensor([[math.log(3.0)]]), torch.tensor([1.0])),
        "b": Targets(row, torch.tensor([[0.0]]), torch.tensor([0.3])),
    }
    heads = {
        "a": Head(Linear(torch.tensor([[1.0], [0.0]])), ("yes", "no")),
        "b": Head(Linear(torch.tensor([[0.0], [2.0], [0.0]])), ("x", "y", "z")),
    }
    objective = Divergence(heads, heads, CPU)
    # Expert a: 3/4, 1/4. Expert b: thirds. The student's feature is log 2: 2/3, 1/3 under a; 1/6, 4/6, 1/6 under b.
    features = {task: torch.full((1, 1), math.log(2.0)) for task in heads}
    a = 0.75 * math.log(0.75 / (2 / 3)) + 0.25 * math.log(0.25 / (1 / 3))
    b = (2 * math.log((1 / 3) / (1 / 6)) + math.log((1 / 3) / (4 / 6))) / 3
    assert objective.loss(features, targets).item() == pytest.approx(1.0 * a + 0.3 * b, rel=1e-5)
    assert objective.terms(features["b"], targets["b"], "b").tolist() == pytest.approx([b], rel=1e-5)
    swapped = {task: replace(t, weights=torch.tensor([2.0 if task == "b" else 0.0])) for task, t in targets.items()}
    assert objective.loss(features, swapped).item() == pytest.approx(2.0 * b, rel=1e-5)


def test_entropy_is_the_sum_over_tasks_of_the_mean() -> None:
    setting = make_setting("bert", inputs=6)
    objective, features, targets = Entropy(setting.heads, CPU), features_of(setting), first_targets(setting, 5)
    expected = 0.0
    for task, head in setting.heads.items():
        shares = head(features[task]).double().softmax(1)
        expected += float(-(shares * shares.log()).sum(1).mean())
    assert float(objective.loss(features, targets)) == pytest.approx(expected)
    assert objective.penalty() is None


def test_sure_and_unsure() -> None:
    head = Head(Linear(torch.tensor([[1.0], [0.0], [0.0], [0.0]])), ("a", "b", "c", "d"))
    targets = Targets(torch.tensor([0, 1]), torch.zeros(2, 1), torch.ones(2))
    features = torch.tensor([[0.0], [1e4]], requires_grad=True)
    entropies = Entropy({"only": head}, CPU).terms(features, targets, "only")
    assert entropies.tolist() == pytest.approx([math.log(4), 0.0])
    entropies.sum().backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert features.grad.isfinite().all()
