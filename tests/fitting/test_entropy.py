"""The entropy of predictions: against torch's, nothing where it is sure, and all heads as they were given."""

from __future__ import annotations

import math

import pytest
import torch
from tests.fitting.making import first_numbers, make_setting

from orthomerge.fitting.entropy import Entropy
from orthomerge.fitting.inputs import Targets
from orthomerge.models.heads import Head, Linear


def test_it_is_the_sum_over_tasks_of_the_mean_entropy() -> None:
    setting = make_setting("bert", inputs=6)
    objective = Entropy(setting.heads, setting.inputs)
    features = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for number, (task, head) in enumerate(setting.heads.items()):
        shares = head(features[number]).double().softmax(1)
        entropies = -(shares * shares.log()).sum(1).float()
        torch.testing.assert_close(objective.judge(features[number], setting.inputs.targets[task], task), entropies)
        expected += float(entropies.mean())
    assert float(objective.loss(features, first_numbers(setting, 6))) == pytest.approx(expected)
    assert objective.penalty() is None
    assert objective.parameters == []
    assert objective.measures() == {}
    assert all(objective.classifiers()[task] is head for task, head in setting.heads.items())


def test_sure_and_unsure() -> None:
    setting = make_setting("bert", inputs=2)
    head = Head(Linear(torch.tensor([[1.0], [0.0], [0.0], [0.0]])), ("a", "b", "c", "d"))
    targets = {"only": setting.inputs.targets["two"]}
    objective = Entropy({"only": head}, setting.inputs.with_targets(targets))
    found = objective.judge(torch.tensor([[0.0], [1e4]]), targets["only"], "only")
    assert found.tolist() == pytest.approx([math.log(4), 0.0])
    features = torch.tensor([[[1e4]]], requires_grad=True)
    objective.loss(features, torch.zeros(1, 1, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert features.grad.isfinite().all()


def test_targets_count_by_their_weights() -> None:
    """Of four equal logits log 4, of two log 2: 0.5 log 4 and 1.0 log 4 in the mean, then 0.3 log 2."""
    inputs = make_setting("bert", inputs=2).inputs
    blank = torch.zeros(2, 1)
    four, two = (Head(Linear(torch.zeros(n, 1)), tuple(map(str, range(n)))) for n in (4, 2))
    targets = {
        "four": Targets(torch.tensor([0, 1]), blank, torch.tensor([0.5, 1.0])),
        "two": Targets(torch.tensor([1, 0]), blank, torch.tensor([0.3, 0.3])),
    }
    objective = Entropy({"four": four, "two": two}, inputs.with_targets(targets))
    numbers = torch.tensor([[0, 1], [2, 3]])
    expected = (0.5 + 1.0) / 2 * math.log(4) + 0.3 * math.log(2)
    assert objective.loss(torch.zeros(2, 2, 1), numbers).item() == pytest.approx(expected)
