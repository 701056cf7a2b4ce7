"""LM-Cocktail: weights from losses by hand, lower losses count more, temperatures, with the base and without."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.fitting.making import KINDS, average, shared_setting

from orthomerge.fitting.inputs import encoded
from orthomerge.fitting.lm_cocktail import LmCocktail
from orthomerge.testing.settings import Kind, make_setting


@pytest.mark.parametrize("kind", KINDS)
def test_weights_follow_from_the_losses(kind: Kind) -> None:
    setting = make_setting(kind)
    fitted = LmCocktail(temperature=0.5).fit(setting)
    shares, losses = fitted.facts["weights"], fitted.facts["losses"]
    assert sum(shares.values()) + fitted.facts["base"] == pytest.approx(1)
    order = sorted(setting.tasks, key=losses.__getitem__)
    assert order == sorted(setting.tasks, key=shares.__getitem__, reverse=True)
    ratio = shares["two"] / fitted.facts["base"]
    assert ratio == pytest.approx(math.exp((fitted.facts["base_loss"] - losses["two"]) / 0.5))
    expected = fitted.facts["base"] * setting.base
    for task, share in shares.items():
        expected = expected + share * setting.tuned(task)
    torch.testing.assert_close(fitted.weights, expected)
    assert fitted.classifiers == setting.heads


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_by_hand(kind: Kind, weight: float) -> None:
    """Every input is one of all tasks, and counts in each by its weight."""
    setting = shared_setting(kind, (1.0, weight), inputs=4)
    setting.encoder.load(setting.tuned("three"))
    terms = []
    for number, (task, head) in enumerate(setting.heads.items()):
        target = head(setting.inputs.targets[task].features).softmax(1)
        student = head(encoded(setting.encoder, setting.inputs, task)).softmax(1)
        each = (target * (target / student).log()).sum(1)
        own = slice(4 * number, 4 * number + 4)
        terms.append(float(weight * each.sum() + (1 - weight) * each[own].sum()) / 12)
    assert LmCocktail().fit(setting).facts["losses"]["three"] == pytest.approx(sum(terms) / 3, rel=1e-5)


def test_a_single_expert_is_its_own_best() -> None:
    setting = make_setting("bert")
    alone = replace(setting, heads={"two": setting.heads["two"]}, inputs=setting.inputs.at({"two": slice(None)}))
    fitted = LmCocktail(base=False).fit(alone)
    torch.testing.assert_close(fitted.weights, setting.tuned("two"))
    assert fitted.facts["weights"] == {"two": 1.0}
    assert "base" not in fitted.facts
    cold = LmCocktail(temperature=1e-4).fit(alone)
    torch.testing.assert_close(cold.weights, setting.tuned("two"))
    assert cold.facts["losses"]["two"] < cold.facts["base_loss"]


def test_a_high_temperature_gives_the_average() -> None:
    setting = make_setting("vit")
    fitted = LmCocktail(temperature=1e9, base=False).fit(setting)
    torch.testing.assert_close(fitted.weights, average(setting), rtol=1e-5, atol=1e-6)
    fitted = LmCocktail(temperature=1e9).fit(setting)
    torch.testing.assert_close(fitted.weights, (3 * average(setting) + setting.base) / 4, rtol=1e-5, atol=1e-6)
