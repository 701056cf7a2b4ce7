"""MOMA: losses by hand, planted masks and rotations that are found, maps that go into the heads, every variant."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.fitting.making import features_of, first_targets, hidden, normal

from orthomerge.fitting.moma import FeatureDistance, Moma
from orthomerge.fitting.setting import Setting, Targets, encoded
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.settings import WIDTH, make_setting

SOFT_AND_HARD = {"soft", "hard", "soft, projected", "hard, projected"}


def planted() -> tuple[Setting, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A merge with noise where there should be nothing, and experts that are the right encoder, each one turned.

    Setting; the merge's vector; which of its elements are noise; the rotations.
    """
    setting = make_setting("vit", inputs=200, layers=1)
    random = torch.Generator().manual_seed(11)
    delta, wrong = torch.zeros_like(setting.base), torch.zeros_like(setting.base, dtype=torch.bool)
    for name, place in setting.layout.places.items():
        if name.endswith(("v_proj.weight", "fc1.weight")):
            count = place.stop - place.start
            delta[place] = 0.2 * torch.randn(count, generator=random)
            wrong[place] = torch.rand(count, generator=random) < 0.3
    setting.encoder.load(setting.base + delta * ~wrong)
    targets, turns = {}, {}
    for task in setting.tasks:
        X = torch.randn(WIDTH, WIDTH, generator=random)
        turns[task] = torch.matrix_exp(0.05 * (X - X.T))
        features = encoded(setting.encoder, setting.inputs, task) @ turns[task].T
        targets[task] = replace(setting.inputs.targets[task], features=features)
    merged = setting.base + delta
    inputs = setting.inputs.with_targets(targets)
    return replace(setting, merged=lambda method, options: merged.clone(), inputs=inputs), delta, wrong, turns


def test_a_planted_problem_is_solved() -> None:
    setting, delta, wrong, turns = planted()
    fitted = Moma(steps=600, map_lr=1e-2, look=200).fit(setting)
    ends = fitted.facts["ends"]
    assert fitted.curve[0]["held_out"] > 20 * ends["soft, projected"]
    assert set(ends) == SOFT_AND_HARD
    live = delta != 0
    off = (fitted.weights - setting.base)[live] / delta[live] < 0.5
    assert float(off[wrong[live]].float().mean()) > 0.85
    assert float(off[~wrong[live]].float().mean()) < 0.15
    assert fitted.facts["masked"] == pytest.approx(float(off.float().mean()), abs=0.01)
    assert fitted.facts["trained"] == len(delta) + 3 * WIDTH**2
    for task, turn in turns.items():
        head, given = fitted.classifiers[task], setting.heads[task]
        assert isinstance(head, Head)
        W = given.output.weight
        assert float((head.output.weight - W @ turn).norm()) < 0.1 * float((W @ turn - W).norm())
        torch.testing.assert_close(head.output.weight @ head.output.weight.T, W @ W.T, rtol=1e-4, atol=1e-4)
        assert given.output.bias is not None
        assert head.output.bias is not None
        assert torch.equal(head.output.bias, given.output.bias)


def test_without_a_mask_the_encoder_stays_and_the_maps_are_found() -> None:
    setting, delta, wrong, turns = planted()
    right = setting.base + delta * ~wrong
    known = replace(setting, merged=lambda method, options: right.clone())
    fitted = Moma(mask="none", steps=300, map_lr=1e-2, hold_out=0.0).fit(known)
    assert torch.equal(fitted.weights, right)
    assert fitted.facts["ends"] == {}
    for task, turn in turns.items():
        head = fitted.classifiers[task]
        assert isinstance(head, Head)
        W = setting.heads[task].output.weight
        assert float((head.output.weight - W @ turn).norm()) < 0.05 * float((W @ turn - W).norm())


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, SOFT_AND_HARD),
        ({"transform": "none"}, {"soft", "hard"}),
        ({"transform": "similarity"}, SOFT_AND_HARD),
        ({"transform": "linear"}, {"soft", "hard"}),
        ({"mask": "hard"}, SOFT_AND_HARD),
        ({"mask": "none"}, {"unmasked", "unmasked, projected"}),
        ({"mask": "none", "transform": "linear"}, {"unmasked"}),
        ({"project": False, "cap": 2.0}, SOFT_AND_HARD),
        ({"start": "ties_sum", "options": {"scale": 0.5}, "norm": "l1"}, SOFT_AND_HARD),
    ],
)
def test_variants(options: dict[str, Any], ends: set[str]) -> None:
    setting = make_setting("bert")
    fitted = Moma(**{"steps": 12, "batch": 8, "look": 6, **options}).fit(setting)
    assert [row["step"] for row in fitted.curve] == [0, 6, 12]
    assert fitted.curve[-1]["held_out"] < fitted.curve[0]["held_out"]
    assert set(fitted.facts["ends"]) == ends
    last = "hard" if options.get("mask") == "hard" else "unmasked" if options.get("mask") == "none" else "soft"
    assert fitted.facts["ends"][last] == pytest.approx(fitted.curve[-1]["held_out"], rel=1e-6)
    assert torch.equal(setting.encoder.weights, fitted.weights)
    for task, head in fitted.classifiers.items():
        assert isinstance(head, Head)
        W, given = head.output.weight, setting.heads[task].output.weight
        assert torch.equal(W, given) == (options.get("transform") == "none")
        grams = torch.allclose(W @ W.T, given @ given.T, rtol=1e-4, atol=1e-4)
        assert grams == (options.get("transform") in (None, "none") and options.get("project", True))
    if options.get("mask") == "hard":
        delta = setting.merged("task_arithmetic", {}) - setting.base
        moved = (fitted.weights - setting.base).abs()
        assert torch.all((moved < 1e-6) | ((moved - delta.abs()).abs() < 1e-6))
        assert 0 < int((moved > 1e-6).sum()) < int((delta.abs() > 1e-6).sum())


def objective_of(setting: Setting, transform: str = "orthogonal", **options: Any) -> FeatureDistance:
    """The objective with maps and factors away from where they start."""
    objective = FeatureDistance(setting.heads, setting.inputs, Moma(transform=transform, **options))  # type: ignore[arg-type]
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
def test_losses_by_hand(norm: str, transform: str) -> None:
    setting = make_setting("bert", inputs=6)
    objective = objective_of(setting, transform, norm=norm)
    features, targets = features_of(setting, 3.0), first_targets(setting, 5)
    total = 0.0
    for task in setting.tasks:
        A = objective.maps[task].detach().double().numpy() * np.exp(objective.factors[task].item())
        gap = features[task].double().numpy() @ A.T - targets[task].features.double().numpy()
        each = {"l2": np.sqrt((gap**2).sum(1)), "l1": np.abs(gap).mean(1), "mse": (gap**2).mean(1)}[norm]
        terms = objective.terms(features[task], targets[task], task).detach()
        np.testing.assert_allclose(terms.numpy(), each, rtol=1e-5)
        total += each.mean()
    assert objective.loss(features, targets).item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("penalty", ["fro", "fro2", "l1"])
def test_penalties_by_hand(penalty: str) -> None:
    setting = make_setting("bert", inputs=6)
    objective = objective_of(setting, penalty=penalty, alpha=0.7)
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
    assert objective_of(setting, "none").penalty() is None
    assert objective_of(setting, "linear").penalty() is None
    assert objective_of(setting, alpha=0.0).penalty() is None
    assert objective_of(setting, "none").parameters == []
    assert objective_of(setting, "none").measures() == {}
    assert [p.shape for p in objective_of(setting, "similarity").parameters] == [(WIDTH, WIDTH)] * 3 + [()] * 3
    heads = objective_of(setting, "none").classifiers()
    assert all(heads[task] is head for task, head in setting.heads.items())


def test_at_the_experts_own_features_there_is_a_gradient_and_it_is_nothing() -> None:
    setting = make_setting("bert", inputs=6)
    objective = FeatureDistance(setting.heads, setting.inputs, Moma())
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
def test_heads_take_up_the_map(transform: str) -> None:
    """Of what a head reads: for one that normalises, the map of features of unit length."""
    setting = mixed(make_setting("bert", inputs=6))
    objective = objective_of(setting, transform)
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
    objective = objective_of(setting)
    features, targets = features_of(setting, 3.0), first_targets(setting, 5)
    length = setting.inputs.targets["two"].features.norm(dim=1).mean()
    two, five = targets["two"], targets["five"]
    unit = torch.nn.functional.normalize
    mapped = unit(features["two"], dim=1) * length @ objective.maps["two"].detach().T
    expected = (mapped - unit(two.features, dim=1) * length).norm(dim=1)
    for scale in (1, 7):
        terms = objective.terms(features["two"] * scale, two, "two").detach()
        torch.testing.assert_close(terms, expected, rtol=1e-5, atol=1e-5)
    plain = objective_of(make_setting("bert", inputs=6)).terms(features["five"], five, "five").detach()
    torch.testing.assert_close(objective.terms(features["five"], five, "five").detach(), plain)
    total = sum(objective.terms(features[task], targets[task], task).mean() for task in setting.tasks)
    torch.testing.assert_close(objective.loss(features, targets), total)


def test_the_projection_is_the_nearest_orthogonal_matrix() -> None:
    setting = make_setting("bert", inputs=6)
    objective = objective_of(setting)
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
    objective = FeatureDistance(heads, setting.inputs.with_targets(targets), Moma())
    features = {task: torch.zeros(1, 2) for task in targets}
    assert objective.loss(features, targets).item() == pytest.approx(1.0 * 5 + 0.3 * 2)
    assert objective.terms(features["three"], targets["three"], "three").item() == pytest.approx(2)
