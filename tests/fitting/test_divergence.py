"""Experts' outputs as targets: all heads at once as one by one, torch's own KL, nothing for the expert itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.fitting.making import CLASSES, WIDTH, make_setting
from torch.nn.functional import kl_div, log_softmax

from orthomerge.fitting.divergence import Divergence
from orthomerge.fitting.kinds import Setting
from orthomerge.heads import Head, Linear


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
    rows = torch.stack([setting.inputs.rows[task][:5] for task in setting.tasks])
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)), rows


@pytest.mark.parametrize("name", ["plain", "hidden", "normalise", "no bias"])
@pytest.mark.parametrize("lr", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_all_heads_at_once_are_the_heads_one_by_one(name: str, lr: float, temperature: float) -> None:
    setting = make_setting("bert", inputs=6)
    heads = variant(setting, name)
    objective = Divergence(heads, setting.heads, setting.inputs, lr=lr, temperature=temperature)
    features, rows = features_of(setting)
    logits = objective._logits(features)
    assert logits.shape == (3, 5, 5)
    expected = 0.0
    for number, (task, head) in enumerate(heads.items()):
        torch.testing.assert_close(logits[number, :, : CLASSES[task]].detach(), head(features[number]))
        target = log_softmax(setting.heads[task](setting.inputs.teacher[rows[number]]) / temperature, 1)
        mine = log_softmax(head(features[number]) / temperature, 1)
        found = kl_div(mine, target, reduction="none", log_target=True).sum(1)
        torch.testing.assert_close(objective.judge(features[number], rows[number], task).detach(), found)
        expected += float(kl_div(mine, target, reduction="batchmean", log_target=True))
    assert objective.loss(features, rows).item() == pytest.approx(expected, rel=1e-5)
    assert objective.penalty() is None


def test_nothing_between_an_expert_and_itself() -> None:
    setting = make_setting("vit", inputs=6)
    objective = Divergence(setting.heads, setting.heads, setting.inputs)
    rows = torch.stack([setting.inputs.rows[task] for task in setting.tasks])
    features = setting.inputs.teacher[rows].requires_grad_(True)
    loss = objective.loss(features, rows)
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
    features, rows = features_of(setting)
    optimiser = torch.optim.Adam(objective.parameters, lr=0.1)
    first = objective.loss(features, rows).item()
    for _ in range(5):
        optimiser.zero_grad()
        loss = objective.loss(features, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert objective.loss(features, rows).item() < first
    for task, head in objective.classifiers().items():
        assert isinstance(head, Head)
        for key, tensor in head.tensors().items():
            assert tensor.dtype == torch.bfloat16
            assert not tensor.requires_grad
            assert not torch.equal(tensor, before[task][key])
            assert torch.equal(given[task].tensors()[key], before[task][key])


def test_held_out_rows_are_looked_up_where_they_belong() -> None:
    setting, other = make_setting("bert", inputs=6), make_setting("bert", inputs=8, seed=3)
    objective = Divergence(setting.heads, setting.heads, setting.inputs, held=other.inputs)
    rows = other.inputs.rows["five"]
    features = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    expected = objective.against(features, other.inputs.teacher[rows], "five")
    torch.testing.assert_close(objective.judge(features, rows, "five"), expected)
