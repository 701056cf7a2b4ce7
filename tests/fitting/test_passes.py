"""A pass over all tasks: the gradient that autograd gives, and groups that hold every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fitting.making import Kind, first_numbers, make_setting, shared_setting

from orthomerge.fitting.distance import FeatureDistance
from orthomerge.fitting.divergence import Divergence
from orthomerge.fitting.entropy import Entropy
from orthomerge.fitting.kinds import Setting
from orthomerge.fitting.objective import Objective
from orthomerge.fitting.passes import backward

OBJECTIVES = ["distance", "divergence", "entropy"]


def objective_of(setting: Setting, name: str) -> Objective:
    if name == "distance":
        options: dict[str, Any] = {"transform": "similarity", "norm": "l2", "penalty": "fro", "alpha": 1.0, "lr": 1e-2}
        return FeatureDistance(setting.heads, setting.inputs, **options)
    if name == "divergence":
        return Divergence(setting.heads, setting.heads, setting.inputs, lr=1e-2)
    return Entropy(setting.heads, setting.inputs)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_loss_and_gradient_are_those_of_one_input_after_the_other(kind: Kind, name: str) -> None:
    setting = make_setting(kind)
    objective = objective_of(setting, name)
    numbers = first_numbers(setting, 8, start=3)
    for _ in range(2):  # nothing is left over from the last one
        loss = backward(setting, objective, numbers)
    found, parameters = setting.encoder.gradient.clone(), [p.grad.clone() for p in objective.parameters]  # type: ignore[union-attr]

    setting.encoder.gradient.zero_()
    features = torch.stack(
        [
            torch.cat([setting.encoder.features(setting.inputs.batch(row[None])) for row in own])
            for own in setting.inputs.rows[numbers]
        ]
    )
    expected = objective.loss(features, numbers)
    penalty = objective.penalty()
    whole = expected if penalty is None else expected + penalty
    of_parameters = torch.autograd.grad(whole, objective.parameters, retain_graph=True) if parameters else ()
    whole.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found, setting.encoder.gradient, atol=1e-5, rtol=1e-4)
    for one, other in zip(parameters, of_parameters, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_groups_hold_every_row_once() -> None:
    inputs = make_setting("bert", inputs=64).inputs
    lengths = (inputs.batch(torch.arange(192))["attention_mask"] != 0).sum(1)
    for seed in range(30):
        rows = torch.randperm(192, generator=torch.Generator().manual_seed(seed))[:48]
        groups, order = inputs.grouped(rows)
        assert order.sort().values.tolist() == list(range(48))
        start = 0
        for end, longest in groups:
            assert longest == lengths[rows[order[start:end]]].max()
            start = end
        assert start == 48


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_an_input_of_several_tasks_is_encoded_once(kind: Kind, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = shared_setting(kind)
    objective, numbers = objective_of(setting, name), first_numbers(setting, 5, start=2)
    numbers[1] += 2  # the second task looks at two inputs that the others do not
    sizes: list[int] = []
    features = setting.encoder.features

    def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(len(next(iter(batch.values()))))
        return features(batch)

    monkeypatch.setattr(setting.encoder, "features", counted)
    loss = backward(setting, objective, numbers)
    assert sum(sizes) == 7
    found = setting.encoder.gradient.clone()
    setting.encoder.gradient.zero_()
    one_by_one = torch.stack([features(setting.inputs.batch(rows)) for rows in setting.inputs.rows[numbers]])
    expected = objective.loss(one_by_one, numbers)
    penalty = objective.penalty()
    (expected if penalty is None else expected + penalty).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found, setting.encoder.gradient, atol=1e-5, rtol=1e-4)
