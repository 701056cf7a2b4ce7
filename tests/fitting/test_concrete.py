"""Concrete merging: relaxed coin tosses, the exact gradient, two levels in turn, task arithmetic where it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orthomerge.files.run_state import RunState
from orthomerge.fitting.coefficients import Coefficients
from orthomerge.fitting.concrete import ConcreteAm, ConcreteMask, ConcreteTa, Final, TwoLevels
from orthomerge.fitting.layout import Layout
from orthomerge.testing.settings import Kind, make_setting

FORMS: tuple[Final, ...] = ("sample", "expected", "binary")
LAYOUT = Layout({"matrix": (30, 50), "vector": (40,), "scalar": ()})


def flat(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return LAYOUT.flat({name: torch.randn(shape, generator=random) for name, shape in LAYOUT.shapes.items()})


def make(*, temperature: float = 0.5, lr: float = 0.1, seed: int = 0) -> ConcreteMask:
    return ConcreteMask(flat(0), flat(1), LAYOUT, temperature=temperature, lr=lr, seed=seed)


def noise_of(mask: ConcreteMask, temperature: float) -> torch.Tensor:
    """Logit(u) of the sample that a mask with logits zero holds."""
    found = torch.zeros(LAYOUT.size)
    for number, place in enumerate(LAYOUT.places.values()):
        m = (mask.mask[place] * mask._means[number]).double()
        found[place] = (temperature * torch.logit(m)).float()
    return found


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_gradient_is_autograds_through_the_rescaling(temperature: float) -> None:
    mask = make(temperature=temperature)
    noise = noise_of(mask, temperature)
    mask.restore(flat(3))  # the same noise: seed and step are what they were
    logits, direction = flat(3).requires_grad_(True), flat(2)
    m = torch.sigmoid((logits + noise) / temperature)
    theta = flat(0)
    for place in LAYOUT.places.values():
        theta[place] = theta[place] + m[place] / m[place].mean() * flat(1)[place]
    weights = torch.empty(LAYOUT.size)
    mask.write(weights)
    torch.testing.assert_close(weights, theta.detach(), rtol=1e-4, atol=1e-5)
    (theta @ direction).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    for name, place in LAYOUT.places.items():
        torch.testing.assert_close(mask.gradient(direction)[place], logits.grad[place], rtol=2e-4, atol=1e-5)
        assert bool(mask.gradient(direction)[place].any()) == (name != "scalar")
    mask.step(direction, weights, 0.5)
    moved = flat(3) - 0.05 * logits.grad.sign()
    strong = logits.grad.abs() > 1e-4
    torch.testing.assert_close(mask.values[strong], moved[strong], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(weights, flat(0) + mask.mask * flat(1))


def test_samples_are_relaxed_bernoulli_by_seed_and_step() -> None:
    mask = make()
    place = LAYOUT.places["matrix"]
    first = mask.mask.clone()
    assert torch.equal(make().mask, first)
    assert not torch.equal(make(seed=1).mask, first)
    for _, view in LAYOUT.views(mask.mask):
        assert float(view.mean()) == pytest.approx(1, abs=1e-5)
    # The median of m is sigma(x / temperature), and P(m > 1/2) = sigma(x).
    mask.restore(torch.full((LAYOUT.size,), 1.0))
    m = mask.mask[place] * mask._means[0]
    assert float((m > 0.5).float().mean()) == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.04)
    assert float(m.median()) == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.03)
    mask = make(lr=1e-12)
    mask.step(flat(2), torch.empty(LAYOUT.size), 1.0)
    assert not torch.equal(mask.mask, first)


def test_the_ends() -> None:
    mask = make()
    assert mask.final("sample") is mask.mask
    for form in FORMS[1:]:
        torch.testing.assert_close(mask.final(form), torch.ones(LAYOUT.size))
    mask.restore(flat(3))
    place = LAYOUT.places["matrix"]
    logits = flat(3)[place]
    soft = torch.sigmoid(logits / 0.5)
    torch.testing.assert_close(mask.final("expected")[place], soft / soft.mean())
    on = (logits > 0).float()
    torch.testing.assert_close(mask.final("binary")[place], on / on.mean())
    mask.restore(torch.full((LAYOUT.size,), -1.0))
    assert not mask.final("binary")[place].any()
    assert mask.measures() == {"masked": 1.0}
    assert make().measures() == {"masked": 0.0}


@pytest.mark.parametrize("final", ["expected", "binary"])
def test_before_its_first_step_it_is_task_arithmetic(final: Final) -> None:
    setting = make_setting("bert")
    mask = ConcreteMask(setting.base, setting.tuned("two") - setting.base, setting.layout)
    found = setting.base + mask.final(final) * mask.vector
    torch.testing.assert_close(found, setting.tuned("two"), rtol=1e-5, atol=1e-6)
    fitted = ConcreteTa(steps=1, lr=1e-12, final="expected").fit(setting)
    torch.testing.assert_close(fitted.weights, setting.merged("task_arithmetic", {"scale": 0.3}), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_entropy_falls(kind: Kind) -> None:
    setting = make_setting(kind)
    fits = {form: ConcreteTa(steps=25, batch=8, lr=0.05, look=25, final=form).fit(setting) for form in FORMS}
    for form, fitted in fits.items():
        ends = fitted.facts["ends"]
        assert set(ends) == set(FORMS)
        assert ends["sample"] == pytest.approx(fitted.curve[-1]["held_out"], rel=1e-6)
        assert ends["sample"] < fitted.curve[0]["held_out"]
        assert fitted.classifiers is setting.heads
        assert fitted.facts["trained"] == setting.layout.size
        assert 0 < fitted.facts["masked"] < 1
        assert all(not torch.equal(fitted.weights, fits[other].weights) for other in FORMS if other != form)


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
    assert not gates.mask.values.any()
    # The second: the mask moves, a new sample is drawn, and coefficients are back where they started.
    gates.step(direction, weights, 1.0)
    assert gates.mask.values.any()
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
    assert torch.equal(gates.mask.values, other.values)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_entropy_falls_in_both_parts_of_concrete_am(kind: Kind) -> None:
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


def test_before_its_first_step_concrete_am_is_task_arithmetic() -> None:
    setting = make_setting("bert")
    fitted = ConcreteAm(steps=1, lr=1e-12, adapt_steps=1, adapt_lr=1e-12, final="expected").fit(setting)
    torch.testing.assert_close(fitted.weights, setting.merged("task_arithmetic", {"scale": 0.3}), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["step 4 of 8", "step 2 of 4"])
def test_killed_and_resumed_in_either_part(part: str, tmp_path: Path) -> None:
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
