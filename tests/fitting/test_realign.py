"""Realign: stages that held-out inputs choose among, mixtures where inputs are few, and nothing added."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fitting.making import shared_setting

from orthomerge.fitting.inputs import encoded
from orthomerge.fitting.realign import Realign
from orthomerge.fitting.setting import Setting
from orthomerge.testing.settings import make_setting

QUICK: dict[str, Any] = {"steps": 30, "look": 10, "batch": 8, "options": {"scale": 0.3}, "solver": "ridge"}


@pytest.fixture(scope="module")
def setting() -> Setting:
    return make_setting("bert", inputs=120)


def loss(setting: Setting, weights: torch.Tensor, heads: Any) -> float:
    """The mean divergence from the experts over all inputs."""
    setting.encoder.load(weights)
    found = []
    for task in setting.tasks:
        teacher = setting.heads[task](setting.inputs.targets[task].features).log_softmax(1)
        student = heads[task](encoded(setting.encoder, setting.inputs, task)).log_softmax(1)
        found.append((teacher.exp() * (teacher - student)).sum(1).mean())
    return float(torch.stack(found).mean())


@pytest.mark.parametrize(
    ("gates", "read_by", "solver"),
    [
        ("auto", "solved", "auto"),
        ("free", "expert", "ridge"),
        ("mask", "solved", "ridge"),
        ("mask", "expert", "ridge"),
        ("row", "solved", "ridge"),
        ("component", "solved", "ridge"),
    ],
)
def test_it_comes_nearer_to_the_experts(setting: Setting, gates: Any, read_by: Any, solver: str) -> None:
    made = Realign(gates=gates, read_by=read_by, **{**QUICK, "solver": solver}).fit(setting)
    merged = setting.merged("task_arithmetic", {"scale": 0.3})
    assert loss(setting, made.weights, made.classifiers) < loss(setting, merged, setting.heads)
    assert made.facts["kept"] in made.facts["held_out"]
    assert made.facts["held_out"][made.facts["kept"]] == min(made.facts["held_out"].values())


def test_what_held_out_inputs_do_not_like_is_not_kept(setting: Setting) -> None:
    """A rate at which training only destroys: the merge with solved heads stays, to the bit."""
    made = Realign(lr=1.0, gates="free", **QUICK).fit(setting)
    merged = setting.merged("task_arithmetic", {"scale": 0.3})
    assert made.facts["kept"] in ("solved", "merged")
    assert torch.equal(made.weights, merged)
    assert made.facts["best_step"] > 0, "heads were solved again for something that was trained"


def test_few_inputs_are_mixed_and_many_are_not(setting: Setting) -> None:
    few = replace(setting, inputs=setting.inputs.at(dict.fromkeys(setting.tasks, slice(6))))
    made = Realign(copies=50, **QUICK).fit(few)
    assert made.facts["mixtures"] == 3 * (50 - 6)
    assert Realign(copies=0, **QUICK).fit(setting).facts["mixtures"] == -sum(
        len(targets) // 10 for targets in setting.inputs.targets.values()
    )


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_inputs_a_task(setting: Setting, count: int) -> None:
    few = replace(setting, inputs=setting.inputs.at(dict.fromkeys(setting.tasks, slice(count))))
    made = Realign(**QUICK).fit(few)
    assert made.weights.isfinite().all()
    made = Realign(copies=0, **QUICK).fit(few)
    assert made.weights.isfinite().all()


@pytest.mark.parametrize("copies", [0, 40])
def test_heads_are_solved_on_the_inputs_that_count_most(copies: int) -> None:
    """Aligners know no weights: of every task its own inputs, and mixtures that began with one of these."""
    shared = shared_setting(inputs=10)
    _, _, solvable = Realign(copies=copies, hold_out=0.0)._inputs(shared)
    for task, targets in solvable.targets.items():
        assert set(targets.weights.tolist()) == {1.0}
        assert all(text.split()[0].startswith(task) for text in list(solvable.raw(task))[:10])
        assert len(targets) >= 10
    made = Realign(copies=copies, hold_out=0.0, **QUICK).fit(shared)
    assert loss(shared, made.weights, made.classifiers) < loss(
        shared, shared.merged("task_arithmetic", {}), shared.heads
    )


def test_pictures() -> None:
    made = Realign(copies=60, **QUICK).fit(make_setting("vit", inputs=20))
    assert made.facts["mixtures"] > 0
    assert made.weights.isfinite().all()
