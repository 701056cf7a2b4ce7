"""The entropy of predictions: against torch's, nothing where it is sure, and all heads as they were given."""

from __future__ import annotations

import math

import pytest
import torch
from tests.fitting.making import make_setting

from orthomerge.fitting.entropy import Entropy
from orthomerge.heads import Head, Linear


def test_it_is_the_sum_over_tasks_of_the_mean_entropy() -> None:
    setting = make_setting("bert", inputs=6)
    objective = Entropy(setting.heads, setting.inputs)
    features = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for number, (task, head) in enumerate(setting.heads.items()):
        shares = head(features[number]).double().softmax(1)
        entropies = -(shares * shares.log()).sum(1).float()
        torch.testing.assert_close(objective.judge(features[number], torch.arange(6), task), entropies)
        expected += float(entropies.mean())
    assert float(objective.loss(features, torch.zeros(3, 6))) == pytest.approx(expected)
    assert objective.penalty() is None
    assert objective.parameters == []
    assert objective.measures() == {}
    assert all(objective.classifiers()[task] is head for task, head in setting.heads.items())


def test_sure_and_unsure() -> None:
    setting = make_setting("bert", inputs=2)
    head = Head(Linear(torch.tensor([[1.0], [0.0], [0.0], [0.0]])), ("a", "b", "c", "d"))
    objective = Entropy({"only": head}, setting.inputs)
    found = objective.judge(torch.tensor([[0.0], [1e4]]), torch.arange(2), "only")
    assert found.tolist() == pytest.approx([math.log(4), 0.0])
    features = torch.tensor([[[1e4]]], requires_grad=True)
    objective.loss(features, torch.zeros(1, 1)).backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert features.grad.isfinite().all()
