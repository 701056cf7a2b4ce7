"""A pass over all tasks: the gradient that autograd gives, few shapes, and on a GPU the same from a recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fitting.making import Kind, make_setting

from orthomerge.fitting.distance import FeatureDistance
from orthomerge.fitting.divergence import Divergence
from orthomerge.fitting.entropy import Entropy
from orthomerge.fitting.free import Free
from orthomerge.fitting.kinds import Setting
from orthomerge.fitting.loop import Loop
from orthomerge.fitting.objective import Objective
from orthomerge.fitting.passes import Passes

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OBJECTIVES = ["distance", "divergence", "entropy"]


def objective_of(setting: Setting, name: str) -> Objective:
    if name == "distance":
        options: dict[str, Any] = {"transform": "similarity", "norm": "l2", "penalty": "fro", "alpha": 1.0, "lr": 1e-2}
        return FeatureDistance(setting.heads, setting.inputs, **options)
    if name == "divergence":
        return Divergence(setting.heads, setting.heads, setting.inputs, lr=1e-2)
    return Entropy(setting.heads, setting.inputs)


def rows_of(setting: Setting, first: int, count: int = 8) -> torch.Tensor:
    return torch.stack([setting.inputs.rows[task][first : first + count] for task in setting.tasks])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_loss_and_gradient_are_those_of_one_input_after_the_other(kind: Kind, name: str) -> None:
    setting = make_setting(kind)
    objective = objective_of(setting, name)
    passes, rows = Passes(setting, objective, setting.inputs), rows_of(setting, 3)
    for _ in range(2):  # nothing is left over from the last one
        loss = passes(rows)
    found, parameters = setting.encoder.gradient.clone(), [p.grad.clone() for p in objective.parameters]  # type: ignore[union-attr]

    setting.encoder.gradient.zero_()
    features = torch.stack(
        [torch.cat([setting.encoder.features(setting.inputs.batch(row[None])) for row in own]) for own in rows]
    )
    expected = objective.loss(features, rows)
    penalty = objective.penalty()
    whole = expected if penalty is None else expected + penalty
    of_parameters = torch.autograd.grad(whole, objective.parameters, retain_graph=True) if parameters else ()
    whole.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found, setting.encoder.gradient, atol=1e-5, rtol=1e-4)
    for one, other in zip(parameters, of_parameters, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_groups_hold_every_row_once_and_few_have_few_shapes() -> None:
    inputs = make_setting("bert", inputs=64).inputs
    lengths = (inputs.batch(torch.arange(192))["attention_mask"] != 0).sum(1)
    shapes: dict[bool, set[Any]] = {True: set(), False: set()}
    for few, seen in shapes.items():
        for seed in range(30):
            rows = torch.randperm(192, generator=torch.Generator().manual_seed(seed))[:48]
            groups, order = inputs.grouped(rows, few=few)
            seen.add(groups)
            assert order.sort().values.tolist() == list(range(48))
            start = 0
            for end, longest in groups:
                assert longest is not None
                assert lengths[rows[order[start:end]]].max() <= longest <= 13
                start = end
            assert start == 48
    assert len(shapes[True]) <= len(shapes[False])


def test_nothing_is_recorded_where_there_is_nothing_to_gain() -> None:
    setting = make_setting()
    assert not Passes(setting, objective_of(setting, "entropy"), setting.inputs).records


@GPU
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_recording_gives_what_a_pass_gives(kind: Kind, name: str) -> None:
    setting = make_setting(kind, device="cuda")
    objective = objective_of(setting, name)
    plain = Passes(setting, objective, setting.inputs, recorded=False)
    expected = []
    for first in range(0, 24, 4):
        loss = float(plain(rows_of(setting, first)))
        expected.append((loss, setting.encoder.gradient.clone(), [p.grad.clone() for p in objective.parameters]))  # type: ignore[union-attr]
    passes = Passes(setting, objective, setting.inputs)
    with passes.stream():
        for _ in range(3):
            for place, first in enumerate(range(0, 24, 4)):
                loss, gradient, parameters = expected[place]
                assert float(passes(rows_of(setting, first))) == pytest.approx(loss, rel=1e-5)
                torch.testing.assert_close(setting.encoder.gradient, gradient, atol=1e-5, rtol=1e-4)
                for parameter, value in zip(objective.parameters, parameters, strict=True):
                    assert parameter.grad is not None
                    torch.testing.assert_close(parameter.grad, value, atol=1e-5, rtol=1e-4)
        assert passes.records
        assert passes._recorded


@GPU
def test_a_recorded_loop_ends_where_a_plain_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for records in (True, False):
        setting = make_setting("bert", device="cuda")
        merged = setting.merged("task_arithmetic", {}).cuda()
        objective = Divergence(setting.heads, setting.heads, setting.inputs, lr=1e-2)
        if not records:
            monkeypatch.setattr("orthomerge.fitting.passes._MOST", 0)
        course = Loop(steps=40, batch=8, look=10).run(
            setting, Free(merged, lr=1e-3), objective, setting.inputs, setting.inputs
        )
        ends.append((setting.encoder.weights.clone(), course.rows[-1]["held_out"]))
    torch.testing.assert_close(ends[0][0], ends[1][0], atol=2e-3, rtol=0)
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-3)


@GPU
def test_an_encoder_that_looks_at_its_numbers_is_run_as_usual() -> None:
    setting = make_setting("vit", device="cuda")
    read = setting.encoder._pool

    def looking(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        features = read(module, batch)
        return features if float(features.detach().sum()) else features + 1

    setting.encoder._pool = looking
    objective = objective_of(setting, "distance")
    passes, rows = Passes(setting, objective, setting.inputs), rows_of(setting, 0)
    with passes.stream():
        losses = [float(passes(rows)) for _ in range(4)]
    assert not passes.records
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
