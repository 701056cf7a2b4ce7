"""AdaMerging and Concrete merging: less entropy by coefficients, relaxed coin tosses, exact gradients, two levels."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.fitting.making import KINDS, Steps

from orthomerge.files.run_state import RunState, clear_state
from orthomerge.fitting.adamerging import AdaMerging, elected
from orthomerge.fitting.concrete import ConcreteAm, ConcreteMask, ConcreteTa, Final, TwoLevels
from orthomerge.fitting.gates import Coefficients
from orthomerge.fitting.layout import Layout
from orthomerge.fitting.setting import Setting
from orthomerge.testing.settings import Kind, make_setting


def by_hand(setting: Setting, table: dict[str, Any], vectors: torch.Tensor) -> torch.Tensor:
    """The base plus the vectors times the coefficients that were reported."""
    total = setting.base.clone()
    for task, vector in zip(setting.tasks, vectors, strict=True):
        for name, place in setting.layout.places.items():
            total[place] += (table[task] if isinstance(table[task], float) else table[task][name]) * vector[place]
    return total


@pytest.mark.parametrize("kind", ["bert", "vit"])
@pytest.mark.parametrize("by", ["layer", "task"])
def test_entropy_falls_from_task_arithmetic(kind: Kind, by: str) -> None:
    setting = make_setting(kind)
    fitted = AdaMerging(by=by, steps=12, batch=8, lr=0.01, look=4, hold_out=0.2).fit(setting)  # type: ignore[arg-type]
    first, last = fitted.curve[0], fitted.curve[-1]
    assert first["least"] == first["most"] == pytest.approx(0.3)
    assert last["held_out"] < first["held_out"]
    assert last["loss"] < fitted.curve[1]["loss"]
    table = fitted.facts["coefficients"]
    assert set(table) == set(setting.tasks)
    assert fitted.facts["trained"] == 3 * (1 if by == "task" else len(setting.layout.shapes))
    torch.testing.assert_close(fitted.weights, by_hand(setting, table, setting.task_vectors()), rtol=1e-5, atol=1e-6)
    assert fitted.classifiers is setting.heads


def test_clamped_or_not() -> None:
    setting = make_setting("bert")
    options: dict[str, Any] = {"by": "task", "start": 0.9, "steps": 8, "batch": 8, "lr": 0.3}
    clamped = AdaMerging(**options).fit(setting).facts["coefficients"]
    free = AdaMerging(**options, clamp=False).fit(setting).facts["coefficients"]
    assert all(0 <= value <= 1 for value in clamped.values())
    assert any(not 0 <= value <= 1 for value in free.values())


def test_the_trimmed_vectors_are_those_of_ties_and_plus_plus_combines_them() -> None:
    setting = make_setting("bert")
    vectors, count = setting.task_vectors(), setting.layout.elements
    found = elected(vectors, 0.2, elements=count)
    trimmed = torch.zeros_like(vectors)
    for number, vector in enumerate(vectors):
        kept = vector.abs().topk(int(0.2 * count)).indices
        trimmed[number, kept] = vector[kept]
    sign = trimmed.sum(0).sign()
    torch.testing.assert_close(found, torch.where(trimmed.sign() == sign, trimmed, torch.zeros(())))
    merged = setting.merged("ties_sum", {"scale": 0.4, "density": 0.2}) - setting.base
    torch.testing.assert_close(0.4 * found.sum(0), merged, rtol=1e-4, atol=1e-6)
    assert torch.equal(elected(vectors[:1], 1.0, elements=count), vectors[:1])
    fitted = AdaMerging(vectors="ties", density=0.5, steps=4, batch=8, lr=0.01).fit(setting)
    vectors = elected(setting.task_vectors(), 0.5, elements=setting.layout.elements)
    expected = by_hand(setting, fitted.facts["coefficients"], vectors)
    torch.testing.assert_close(fitted.weights, expected, rtol=1e-5, atol=1e-6)


LAYOUT = Layout({"matrix": (30, 50), "vector": (40,), "scalar": ()})


def flat(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return LAYOUT.flat({name: torch.randn(shape, generator=random) for name, shape in LAYOUT.shapes.items()})


def make(*, logits: torch.Tensor | float = 0.0, temperature: float = 0.5, lr: float = 0.1, seed: int = 0) -> Steps:
    mask = ConcreteMask(flat(0), flat(1), LAYOUT, temperature=temperature, lr=lr, seed=seed)
    mask.values.copy_(torch.as_tensor(logits))
    return Steps(mask, LAYOUT.size)


def mask_of(steps: Steps) -> ConcreteMask:
    assert isinstance(steps.gates, ConcreteMask)
    return steps.gates


def noise_of(mask: ConcreteMask, temperature: float) -> torch.Tensor:
    """Logit(u) of the sample of a mask whose logits are zero."""
    noise = torch.zeros(LAYOUT.size)
    for number, place in enumerate(LAYOUT.places.values()):
        m = (mask.mask[place] * mask._means[number]).double()
        noise[place] = (temperature * torch.logit(m)).float()
    return noise


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_gradient_is_autograds_through_the_rescaling(temperature: float) -> None:
    noise = noise_of(mask_of(make(temperature=temperature)), temperature)
    steps = make(logits=flat(3), temperature=temperature)  # the same noise: seed and step are what they were
    mask = mask_of(steps)
    logits, direction = flat(3).requires_grad_(True), flat(2)
    m = torch.sigmoid((logits + noise) / temperature)
    theta = flat(0)
    for place in LAYOUT.places.values():
        theta[place] = theta[place] + m[place] / m[place].mean() * flat(1)[place]
    torch.testing.assert_close(steps.weights, theta.detach(), rtol=1e-4, atol=1e-5)
    (theta @ direction).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    for name, place in LAYOUT.places.items():
        torch.testing.assert_close(mask.gradient(direction)[place], logits.grad[place], rtol=2e-4, atol=1e-5)
        assert bool(mask.gradient(direction)[place].any()) == (name != "scalar")
    weights = steps.take(direction, 0.5)
    moved = flat(3) - 0.05 * logits.grad.sign()
    strong = logits.grad.abs() > 1e-4
    torch.testing.assert_close(mask.values[strong], moved[strong], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(weights, flat(0) + mask.mask * flat(1))


def test_samples_are_relaxed_bernoulli_by_seed_and_step() -> None:
    first = mask_of(make()).mask
    assert torch.equal(mask_of(make()).mask, first)
    assert not torch.equal(mask_of(make(seed=1)).mask, first)
    for _, view in LAYOUT.views(first):
        assert float(view.mean()) == pytest.approx(1, abs=1e-5)
    # The median of m is sigma(x / temperature), and P(m > 1/2) = sigma(x).
    mask = mask_of(make(logits=1.0))
    m = mask.mask[LAYOUT.places["matrix"]] * mask._means[0]
    assert float((m > 0.5).float().mean()) == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.04)
    assert float(m.median()) == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.03)
    steps = make(lr=1e-12)
    steps.take(flat(2))
    assert not torch.equal(mask_of(steps).mask, first)


def test_the_ends() -> None:
    mask = mask_of(make())
    assert mask.final("sample") is mask.mask
    assert mask.measures() == {"masked": 0.0}
    for form in get_args(Final)[1:]:
        torch.testing.assert_close(mask.final(form), torch.ones(LAYOUT.size))
    place = LAYOUT.places["matrix"]
    logits = flat(3)[place]
    soft, on = torch.sigmoid(logits / 0.5), (logits > 0).float()
    mask = mask_of(make(logits=flat(3)))
    torch.testing.assert_close(mask.final("expected")[place], soft / soft.mean())
    torch.testing.assert_close(mask.final("binary")[place], on / on.mean())
    off = mask_of(make(logits=-1.0))
    assert not off.final("binary")[place].any()
    assert off.measures() == {"masked": 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_falls(kind: Kind) -> None:
    setting, forms = make_setting(kind), get_args(Final)
    fits = {form: ConcreteTa(steps=25, batch=8, lr=0.05, look=25, final=form).fit(setting) for form in forms}
    for form, fitted in fits.items():
        ends = fitted.facts["ends"]
        assert tuple(ends) == forms
        assert ends["sample"] == pytest.approx(fitted.curve[-1]["held_out"], rel=1e-6)
        assert ends["sample"] < fitted.curve[0]["held_out"]
        assert fitted.classifiers is setting.heads
        assert fitted.facts["trained"] == setting.layout.size
        assert 0 < fitted.facts["masked"] < 1
        assert all(not torch.equal(fitted.weights, fits[other].weights) for other in forms if other != form)


def levels(*, clamp: bool = True) -> tuple[Steps, ConcreteMask]:
    vectors = torch.stack([flat(seed) for seed in (4, 5, 6)])
    zero, mask = torch.zeros(LAYOUT.size), mask_of(make())
    own = Coefficients(zero, vectors, LAYOUT, by_tensor=True, lr=1.0, clamp=clamp)
    return Steps(TwoLevels(mask, own), LAYOUT.size), mask


@pytest.mark.parametrize("clamp", [True, False])
def test_two_levels_step_in_turn(clamp: bool) -> None:
    steps, mask = levels(clamp=clamp)
    vectors = torch.stack([flat(seed) for seed in (4, 5, 6)])
    sample = mask.mask.clone()
    torch.testing.assert_close(steps.weights, flat(0) + sample * 0.3 * vectors.sum(0))
    # The first level: a whole rate against the sign of the gradient of each coefficient, under the same sample.
    direction = flat(7)
    weights = steps.take(direction)
    expected = flat(0)
    for place in LAYOUT.places.values():
        slope = (vectors[:, place] * sample[place]) @ direction[place]
        values = 0.3 - slope.sign()
        expected[place] += sample[place] * ((values.clamp(0, 1) if clamp else values) @ vectors[:, place])
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(mask.mask, sample)
    assert not mask.values.any()
    # The second: the mask moves as one over the vector that the first level left; then a new sample is drawn, and
    # coefficients are back where they started.
    other = make()
    mask_of(other).vector = mask.vector.clone()
    other.take(flat(8))
    weights = steps.take(flat(8))
    assert mask.values.any()
    assert torch.equal(mask.values, other.gates.values)
    assert not torch.equal(mask.mask, sample)
    torch.testing.assert_close(weights, flat(0) + mask.mask * 0.3 * vectors.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_falls_in_both_parts_of_concrete_am(kind: Kind) -> None:
    setting = make_setting(kind)
    fitted = ConcreteAm(steps=15, batch=8, lr=0.05, adapt_steps=15, adapt_lr=0.01, look=15).fit(setting)
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


@pytest.mark.parametrize("part", ["step 4 of 8", "step 3 of 8", "step 2 of 4"])
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
    assert len(said) == {"step 4 of 8": 5 + 5, "step 3 of 8": 6 + 5, "step 2 of 4": 3}[part]
    clear_state(state.folder)
    assert not any(tmp_path.iterdir())
