"""MOMA's objective: losses and penalties by hand, heads that take up the map exactly, and the projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.fitting.making import first_targets
from tests.fitting.test_objective import features_of, hidden, normal

from orthomerge.fitting.distance import FeatureDistance, Norm, Penalty, Transform
from orthomerge.fitting.inputs import Targets
from orthomerge.fitting.setting import Setting
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.settings import WIDTH, make_setting


def make(setting: Setting, transform: Transform = "orthogonal", **options: Any) -> FeatureDistance:
    chosen: dict[str, Any] = {"norm": "l2", "penalty": "fro", "alpha": 1.0, "lr": 1e-3, **options}
    objective = FeatureDistance(setting.heads, setting.inputs, transform=transform, **chosen)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        if transform != "none":
            for A in objective.maps.values():
                A.add_(0.2 * torch.randn(A.shape, generator=random))
        if transform == "similarity":
            for factor, value in zip(objective.factors.values(), (0.3, -0.2, 0.1), strict=True):
                factor.fill_(value)
    return objective


def mixed(setting: Setting) -> Setting:
    """A head that normalises, one with a hidden layer, and a plain one."""
    heads = dict(setting.heads)
    heads["two"], heads["three"] = normal(heads["two"]), hidden(heads["three"])
    return replace(setting, heads=heads)


@pytest.mark.parametrize("norm", ["l2", "l1", "mse"])
@pytest.mark.parametrize("transform", ["none", "orthogonal", "similarity", "linear"])
def test_losses_by_hand(norm: Norm, transform: Transform) -> None:
    setting = make_setting("bert", inputs=6)
    objective = make(setting, transform, norm=norm)
    features, targets = features_of(setting, 3.0), first_targets(setting, 5)
    total = 0.0
    for task in setting.tasks:
        A = objective.maps[task].detach().double().numpy() * np.exp(objective.factors[task].item())
        gap = features[task].double().numpy() @ A.T - targets[task].features.double().numpy()
        each = {
            "l2": np.sqrt((gap**2).sum(1)),
            "l1": np.abs(gap).mean(1),
            "mse": (gap**2).mean(1),
        }[norm]
        terms = objective.terms(features[task], targets[task], task).detach()
        np.testing.assert_allclose(terms.numpy(), each, rtol=1e-5)
        total += each.mean()
    assert objective.loss(features, targets).item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("penalty", ["fro", "fro2", "l1"])
def test_penalties_by_hand(penalty: Penalty) -> None:
    setting = make_setting("bert", inputs=6)
    objective = make(setting, penalty=penalty, alpha=0.7)
    excess = [A.T @ A - np.eye(WIDTH) for A in (each.detach().double().numpy() for each in objective.maps.values())]
    by_hand = {
        "fro": sum(np.linalg.norm(each) for each in excess),
        "fro2": sum(np.linalg.norm(each) ** 2 for each in excess),
        "l1": sum(np.abs(each).sum() for each in excess),
    }[penalty]
    found = objective.penalty()
    assert found is not None
    assert found.item() == pytest.approx(0.7 * by_hand, rel=1e-5)
    assert objective.measures()["defect"] == pytest.approx(np.mean([np.linalg.norm(each) for each in excess]), rel=1e-5)


def test_where_there_is_no_penalty_and_nothing_to_train() -> None:
    setting = make_setting("bert", inputs=6)
    assert make(setting, "none").penalty() is None
    assert make(setting, "linear").penalty() is None
    assert make(setting, alpha=0.0).penalty() is None
    assert make(setting, "none").parameters == []
    assert make(setting, "none").measures() == {}
    assert [p.shape for p in make(setting, "similarity").parameters] == [(WIDTH, WIDTH)] * 3 + [()] * 3
    heads = make(setting, "none").classifiers()
    assert all(heads[task] is head for task, head in setting.heads.items())


def test_at_the_experts_own_features_there_is_a_gradient_and_it_is_nothing() -> None:
    setting = make_setting("bert", inputs=6)
    objective = FeatureDistance(
        setting.heads, setting.inputs, transform="orthogonal", norm="l2", penalty="fro", alpha=1.0, lr=1e-3
    )
    targets = setting.inputs.targets
    features = {task: some.features.clone().requires_grad_(True) for task, some in targets.items()}
    penalty = objective.penalty()
    assert penalty is not None
    whole = objective.loss(features, targets) + penalty
    whole.backward()  # type: ignore[no-untyped-call]
    assert whole.item() < 1e-6
    for each in (*features.values(), *objective.maps.values()):
        assert each.grad is not None
        assert float(each.grad.abs().max()) == 0.0


@pytest.mark.parametrize("transform", ["orthogonal", "similarity", "linear"])
def test_heads_take_up_the_map(transform: Transform) -> None:
    """Of what a head reads: for one that normalises, the map of features of unit length."""
    setting = mixed(make_setting("bert", inputs=6))
    objective = make(setting, transform)
    features = features_of(setting, 3.0)
    for task, absorbed in objective.classifiers().items():
        head = setting.heads[task]
        read = torch.nn.functional.normalize(features[task], dim=-1) if head.normalise else features[task]
        mapped = read @ objective.maps[task].detach().T * objective.factors[task].detach().exp()
        expected = replace(head, normalise=False)(mapped)
        assert isinstance(absorbed, Head)
        assert absorbed.normalise == head.normalise
        torch.testing.assert_close(absorbed(features[task]), expected, rtol=1e-5, atol=1e-5)
        assert {n: t.shape for n, t in absorbed.tensors().items()} == {n: t.shape for n, t in head.tensors().items()}
        if head.output.bias is not None and absorbed.output.bias is not None:
            assert torch.equal(absorbed.output.bias, head.output.bias)


def test_a_head_that_normalises_is_fitted_at_the_experts_mean_length() -> None:
    setting = mixed(make_setting("bert", inputs=6))
    objective = make(setting)
    features, targets = features_of(setting, 3.0), first_targets(setting, 5)
    length = setting.inputs.targets["two"].features.norm(dim=1).mean()
    two, five = targets["two"], targets["five"]
    unit = torch.nn.functional.normalize
    mapped = unit(features["two"], dim=1) * length @ objective.maps["two"].detach().T
    expected = (mapped - unit(two.features, dim=1) * length).norm(dim=1)
    for scale in (1, 7):
        terms = objective.terms(features["two"] * scale, two, "two").detach()
        torch.testing.assert_close(terms, expected, rtol=1e-5, atol=1e-5)
    plain = make(make_setting("bert", inputs=6)).terms(features["five"], five, "five").detach()
    torch.testing.assert_close(objective.terms(features["five"], five, "five").detach(), plain)
    total = sum(objective.terms(features[task], targets[task], task).mean() for task in setting.tasks)
    torch.testing.assert_close(objective.loss(features, targets), total)


def test_the_projection_is_the_nearest_orthogonal_matrix() -> None:
    setting = make_setting("bert", inputs=6)
    objective = make(setting)
    before = {task: A.detach().double().numpy().copy() for task, A in objective.maps.items()}
    objective.project()
    for task, each in objective.maps.items():
        A = each.detach().double().numpy()
        np.testing.assert_allclose(A.T @ A, np.eye(WIDTH), atol=1e-5)
        U, _, Vt = np.linalg.svd(before[task])
        np.testing.assert_allclose(A, U @ Vt, atol=1e-5)
    assert all(A.requires_grad for A in objective.maps.values())
    assert objective.measures()["defect"] < 1e-5


def test_an_input_of_two_tasks_counts_in_both_by_its_weights() -> None:
    """One input, a student at the origin, experts at (3, 4) and (0, 2): distances 5 and 2."""
    setting = make_setting("bert", inputs=1)
    targets = {
        "two": Targets(torch.tensor([0]), torch.tensor([[3.0, 4.0]]), torch.tensor([1.0])),
        "three": Targets(torch.tensor([0]), torch.tensor([[0.0, 2.0]]), torch.tensor([0.3])),
    }
    heads = {task: Head(Linear(torch.eye(2)), ("yes", "no")) for task in targets}
    options: dict[str, Any] = {"norm": "l2", "penalty": "fro", "alpha": 1.0, "lr": 1e-3}
    objective = FeatureDistance(heads, setting.inputs.with_targets(targets), transform="orthogonal", **options)
    features = {task: torch.zeros(1, 2) for task in targets}
    assert objective.loss(features, targets).item() == pytest.approx(1.0 * 5 + 0.3 * 2)
    assert objective.terms(features["three"], targets["three"], "three").item() == pytest.approx(2)
