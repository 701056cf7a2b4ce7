"""MOMA's objective: losses and penalties by hand, heads that take up the map exactly, and the projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.fitting.making import WIDTH, all_features, first_numbers, make_setting
from tests.fitting.test_divergence import hidden, normal

from orthomerge.fitting.distance import FeatureDistance, Norm, Penalty, Transform
from orthomerge.fitting.inputs import Targets
from orthomerge.fitting.kinds import Setting
from orthomerge.models.heads import Head, Linear


def make(setting: Setting, transform: Transform = "orthogonal", **options: Any) -> FeatureDistance:
    chosen: dict[str, Any] = {"norm": "l2", "penalty": "fro", "alpha": 1.0, "lr": 1e-3, **options}
    objective = FeatureDistance(setting.heads, setting.inputs, transform=transform, **chosen)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        if transform != "none":
            objective.A += 0.2 * torch.randn(objective.A.shape, generator=random)
        if transform == "similarity":
            objective.factors += torch.tensor([0.3, -0.2, 0.1])
    return objective


def mixed(setting: Setting) -> Setting:
    """A head that normalises, one with a hidden layer, and a plain one."""
    heads = dict(setting.heads)
    heads["two"], heads["three"] = normal(heads["two"]), hidden(heads["three"])
    return replace(setting, heads=heads)


def features_of(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    return 3 * torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)), first_numbers(setting, 5)


def first(setting: Setting, task: str) -> Targets:
    """Those that `features_of` has the numbers of."""
    return setting.inputs.targets[task].at(slice(5))


@pytest.mark.parametrize("norm", ["l2", "l1", "mse"])
@pytest.mark.parametrize("transform", ["none", "orthogonal", "similarity", "linear"])
def test_losses_by_hand(norm: Norm, transform: Transform) -> None:
    setting = make_setting("bert", inputs=6)
    objective = make(setting, transform, norm=norm)
    features, numbers = features_of(setting)
    total = 0.0
    for number, task in enumerate(setting.tasks):
        A = objective.A[number].detach().double().numpy() * np.exp(objective.factors[number].item())
        gap = features[number].double().numpy() @ A.T - first(setting, task).features.double().numpy()
        each = {
            "l2": np.sqrt((gap**2).sum(1)),
            "l1": np.abs(gap).mean(1),
            "mse": (gap**2).mean(1),
        }[norm]
        judged = objective.judge(features[number], first(setting, task), task).detach()
        np.testing.assert_allclose(judged.numpy(), each, rtol=1e-5)
        total += each.mean()
    assert objective.loss(features, numbers).item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("penalty", ["fro", "fro2", "l1"])
def test_penalties_by_hand(penalty: Penalty) -> None:
    setting = make_setting("bert", inputs=6)
    objective = make(setting, penalty=penalty, alpha=0.7)
    excess = [A.T @ A - np.eye(WIDTH) for A in objective.A.detach().double().numpy()]
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
    assert [p.shape for p in make(setting, "similarity").parameters] == [(3, WIDTH, WIDTH), (3,)]
    heads = make(setting, "none").classifiers()
    assert all(heads[task] is head for task, head in setting.heads.items())


def test_at_the_experts_own_features_there_is_a_gradient_and_it_is_nothing() -> None:
    setting = make_setting("bert", inputs=6)
    objective = FeatureDistance(
        setting.heads, setting.inputs, transform="orthogonal", norm="l2", penalty="fro", alpha=1.0, lr=1e-3
    )
    numbers = first_numbers(setting, 6)
    features = all_features(setting)[numbers].requires_grad_(True)
    penalty = objective.penalty()
    assert penalty is not None
    whole = objective.loss(features, numbers) + penalty
    whole.backward()  # type: ignore[no-untyped-call]
    assert whole.item() < 1e-6
    assert features.grad is not None
    assert objective.A.grad is not None
    assert float(features.grad.abs().max()) == float(objective.A.grad.abs().max()) == 0.0


@pytest.mark.parametrize("transform", ["orthogonal", "similarity", "linear"])
def test_heads_take_up_the_map(transform: Transform) -> None:
    """Of what a head reads: for one that normalises, the map of features of unit length."""
    setting = mixed(make_setting("bert", inputs=6))
    objective = make(setting, transform)
    features, _ = features_of(setting)
    for number, (task, absorbed) in enumerate(objective.classifiers().items()):
        head = setting.heads[task]
        read = torch.nn.functional.normalize(features[number], dim=-1) if head.normalise else features[number]
        mapped = read @ objective.A[number].detach().T * objective.factors[number].detach().exp()
        expected = replace(head, normalise=False)(mapped)
        assert isinstance(absorbed, Head)
        assert absorbed.normalise == head.normalise
        torch.testing.assert_close(absorbed(features[number]), expected, rtol=1e-5, atol=1e-5)
        assert {n: t.shape for n, t in absorbed.tensors().items()} == {n: t.shape for n, t in head.tensors().items()}
        if head.output.bias is not None and absorbed.output.bias is not None:
            assert torch.equal(absorbed.output.bias, head.output.bias)


def test_a_head_that_normalises_is_fitted_at_the_experts_mean_length() -> None:
    setting = mixed(make_setting("bert", inputs=6))
    objective = make(setting)
    features, numbers = features_of(setting)
    length = setting.inputs.targets["two"].features.norm(dim=1).mean()
    two, five = first(setting, "two"), first(setting, "five")
    unit = torch.nn.functional.normalize
    mapped = unit(features[0], dim=1) * length @ objective.A[0].detach().T
    expected = (mapped - unit(two.features, dim=1) * length).norm(dim=1)
    torch.testing.assert_close(objective.judge(features[0], two, "two").detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(objective.judge(features[0] * 7, two, "two").detach(), expected, rtol=1e-5, atol=1e-5)
    plain = make(make_setting("bert", inputs=6)).judge(features[2], five, "five").detach()
    torch.testing.assert_close(objective.judge(features[2], five, "five").detach(), plain)
    total = sum(objective.judge(features[n], first(setting, task), task).mean() for n, task in enumerate(setting.tasks))
    torch.testing.assert_close(objective.loss(features, numbers), total)


def test_the_projection_is_the_nearest_orthogonal_matrix() -> None:
    setting = make_setting("bert", inputs=6)
    objective = make(setting)
    before = objective.A.detach().double().numpy().copy()
    objective.project()
    for number, A in enumerate(objective.A.detach().double().numpy()):
        np.testing.assert_allclose(A.T @ A, np.eye(WIDTH), atol=1e-5)
        U, _, Vt = np.linalg.svd(before[number])
        np.testing.assert_allclose(A, U @ Vt, atol=1e-5)
    assert objective.A.requires_grad
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
    numbers = torch.tensor([[0], [1]])
    assert objective.loss(torch.zeros(2, 1, 2), numbers).item() == pytest.approx(1.0 * 5 + 0.3 * 2)
    assert objective.judge(torch.zeros(1, 2), targets["three"], "three").item() == pytest.approx(2)
