"""Concrete task arithmetic: relaxed coin tosses, the exact gradient, task arithmetic where it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.fitting.making import Kind, make_setting

from orthomerge.core.errors import RecipeError
from orthomerge.fitting import loop as module
from orthomerge.fitting.concrete import ConcreteMask, Final
from orthomerge.fitting.concrete_ta import ConcreteTa
from orthomerge.fitting.layout import Layout
from orthomerge.tuning.state import RunState

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
    for number, (name, place) in enumerate(LAYOUT.places.items()):
        torch.testing.assert_close(mask.gradient(direction, number), logits.grad[place], rtol=2e-4, atol=1e-5)
        assert bool(mask.gradient(direction, number).any()) == (name != "scalar")
    mask.step(direction, weights, 0.5)
    moved = flat(3) - 0.05 * logits.grad.sign()
    strong = logits.grad.abs() > 1e-4
    torch.testing.assert_close(mask.logits[strong], moved[strong], rtol=1e-3, atol=1e-4)
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


def test_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BETWEEN", 0.0)
    method = ConcreteTa(steps=6, batch=4, look=2)
    whole = method.fit(make_setting("bert"))
    assert torch.equal(method.fit(make_setting("bert")).weights, whole.weights)
    state = RunState(tmp_path / "state", "this run")

    def kill(text: str) -> None:
        if text.startswith("step 4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.fit(replace(make_setting("bert"), state=state, say=kill))
    assert torch.equal(method.fit(replace(make_setting("bert"), state=state)).weights, whole.weights)


def test_refusals() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RecipeError, match=f"'temperature' must be positive, got {wrong}; the paper's is 0.5"):
            ConcreteTa(temperature=wrong)
    with pytest.raises(RecipeError, match="'batch' must be at least 1, got 0"):
        ConcreteTa(batch=0)
