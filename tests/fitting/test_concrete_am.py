"""Concrete AdaMerging: two levels that step in turn, the mask that stays, and the coefficients under it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.fitting.making import Kind, make_setting
from tests.fitting.test_concrete_ta import LAYOUT, flat, make

from orthomerge.core.errors import RecipeError
from orthomerge.fitting import loop as module
from orthomerge.fitting.coefficients import Coefficients
from orthomerge.fitting.concrete_am import ConcreteAm, TwoLevels
from orthomerge.tuning.state import RunState


def levels(*, clamp: bool = True) -> TwoLevels:
    bounds = (0.0, 1.0) if clamp else None
    vectors = torch.stack([flat(seed) for seed in (4, 5, 6)])
    zero = torch.zeros(LAYOUT.size)
    return TwoLevels(make(), Coefficients(zero, vectors, LAYOUT, groups="tensor", start=0.3, lr=1.0, bounds=bounds))


@pytest.mark.parametrize("clamp", [True, False])
def test_two_levels_step_in_turn(clamp: bool) -> None:
    gates, weights = levels(clamp=clamp), torch.empty(LAYOUT.size)
    vectors = torch.stack([flat(seed) for seed in (4, 5, 6)])
    sample = gates.mask.mask.clone()
    gates.write(weights)
    torch.testing.assert_close(weights, flat(0) + sample * 0.3 * vectors.sum(0))
    # The first level: a whole rate against the sign of the gradient of each coefficient, under the same sample.
    direction = flat(7)
    gates.step(direction, weights, 1.0)
    expected = flat(0)
    for place in LAYOUT.places.values():
        slope = (vectors[:, place] * sample[place]) @ direction[place]
        values = 0.3 - slope.sign()
        expected[place] += sample[place] * ((values.clamp(0, 1) if clamp else values) @ vectors[:, place])
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(gates.mask.mask, sample)
    assert not gates.mask.logits.any()
    # The second: the mask moves, a new sample is drawn, and coefficients are back where they started.
    gates.step(direction, weights, 1.0)
    assert gates.mask.logits.any()
    assert not torch.equal(gates.mask.mask, sample)
    torch.testing.assert_close(weights, flat(0) + gates.mask.mask * 0.3 * vectors.sum(0), rtol=1e-4, atol=1e-5)


def test_the_mask_steps_with_the_coefficients_as_they_are() -> None:
    """Its gradient is that of a mask over the vector that the first level left."""
    gates, weights = levels(), torch.empty(LAYOUT.size)
    gates.step(flat(7), weights, 1.0)
    other = make()
    other.vector = gates.mask.vector.clone()
    gates.step(flat(8), weights, 1.0)
    other.step(flat(8), weights, 1.0)
    assert torch.equal(gates.mask.logits, other.logits)


def test_a_state_between_the_levels() -> None:
    gates, weights = levels(), torch.empty(LAYOUT.size)
    for seed in range(3):
        gates.step(flat(seed), weights, 1.0)
    other, again = levels(), torch.empty(LAYOUT.size)
    other.load(gates.state())
    other.write(again)
    assert torch.equal(again, weights)
    gates.step(flat(9), weights, 1.0)
    other.step(flat(9), again, 1.0)
    assert torch.equal(again, weights)
    kept = gates.kept()
    gates.step(flat(9), again, 1.0)
    gates.step(flat(9), again, 1.0)
    gates.restore(kept)
    assert torch.equal(gates.mask.logits, kept)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_entropy_falls_in_both_parts(kind: Kind) -> None:
    setting = make_setting(kind)
    method = ConcreteAm(steps=15, batch=8, lr=0.05, adapt_steps=15, adapt_lr=0.01, look=15)
    fitted = method.fit(setting)
    first, second = ([row for row in fitted.curve if row["stage"] == stage] for stage in (1, 2))
    assert [row["step"] for row in first] == [0, 15, 30]
    assert [row["step"] for row in second] == [0, 15]
    assert first[-1]["held_out"] < first[0]["held_out"]
    assert second[-1]["held_out"] < second[0]["held_out"]
    # The second part begins where the first ended: the same sample, coefficients at 0.3.
    assert second[0]["held_out"] == pytest.approx(first[-1]["held_out"], rel=1e-4)
    assert second[0]["least"] == second[0]["most"] == pytest.approx(0.3)
    assert fitted.facts["trained"] == setting.layout.size + 3 * len(setting.layout.shapes)
    assert set(fitted.facts["coefficients"]["five"]) == set(setting.layout.shapes)
    assert 0 < fitted.facts["masked"] < 1
    assert fitted.classifiers is setting.heads
    assert torch.equal(method.fit(make_setting(kind)).weights, fitted.weights)


def test_before_its_first_step_it_is_task_arithmetic() -> None:
    setting = make_setting("bert")
    fitted = ConcreteAm(steps=1, lr=1e-12, adapt_steps=1, adapt_lr=1e-12, final="expected").fit(setting)
    torch.testing.assert_close(fitted.weights, setting.merged("task_arithmetic", {"scale": 0.3}), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["step 4 of 8", "step 2 of 4"])
def test_killed_and_resumed_in_either_part(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BETWEEN", 0.0)
    method = ConcreteAm(steps=4, batch=4, adapt_steps=4, look=1)
    whole = method.fit(make_setting("bert"))
    state = RunState(tmp_path / "state", "this run")

    def kill(text: str) -> None:
        if text.startswith(part):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.fit(replace(make_setting("bert"), state=state, say=kill))
    said: list[str] = []
    resumed = method.fit(replace(make_setting("bert"), state=state, say=said.append))
    assert torch.equal(resumed.weights, whole.weights)
    assert len(said) == (5 + 5 if part.endswith("8") else 3)
    state.remove()
    assert not any(tmp_path.iterdir())


def test_refusals() -> None:
    words = "'inner_lr' and 'adapt_lr' must be positive, and 'adapt_steps' at least 1"
    for options in ({"inner_lr": 0.0}, {"adapt_lr": -1.0}, {"adapt_steps": 0}):
        with pytest.raises(RecipeError, match=words):
            ConcreteAm(**options)
    with pytest.raises(RecipeError, match="'temperature' must be positive, got 0"):
        ConcreteAm(temperature=0.0)
    with pytest.raises(RecipeError, match="'steps' must be at least 1, got 0"):
        ConcreteAm(steps=0)
