"""MOMA: a planted mask and planted rotations are found, maps go into the heads, and every variant runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from orthomerge.fitting.distance import FeatureDistance
from orthomerge.fitting.inputs import encoded
from orthomerge.fitting.moma import Moma
from orthomerge.fitting.setting import Setting
from orthomerge.models.heads import Head
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


def test_the_absorbed_model_is_the_trained_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FeatureDistance] = []
    before = FeatureDistance.__init__

    def keep(self: FeatureDistance, *args: Any, **options: Any) -> None:
        before(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(FeatureDistance, "__init__", keep)
    setting = make_setting("vit")
    fitted = Moma(steps=10, batch=8, map_lr=0.02).fit(setting)
    for task, A in made[0].maps.items():
        torch.testing.assert_close(A.T @ A, torch.eye(WIDTH), rtol=1e-5, atol=1e-5)
        features = encoded(setting.encoder, setting.inputs, task)
        expected = setting.heads[task](features @ A.detach().T)
        torch.testing.assert_close(fitted.classifiers[task](features), expected, rtol=1e-5, atol=1e-5)


def test_of_few_inputs_none_is_held_out() -> None:
    fitted = Moma(steps=5, batch=8, look=5).fit(make_setting("bert", inputs=9))
    assert "held_out" not in fitted.curve[-1]
