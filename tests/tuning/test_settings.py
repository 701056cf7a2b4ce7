"""The settings of a run: read strictly, checked, and where they run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build
from orthomerge.tuning.settings import Tuning


def test_settings_are_a_schema() -> None:
    read = build(Tuning, {"mode": "tau_jp", "epochs": 2, "penalty": 0.5, "steps": 7}, where="tuning")
    assert read == Tuning(mode="tau_jp", epochs=2.0, penalty=0.5, steps=7)
    with pytest.raises(RecipeError, match=r"unknown option 'learning_rate'"):
        build(Tuning, {"learning_rate": 1.0}, where="tuning")
    with pytest.raises(
        RecipeError, match=r"'mode' must be full \| head_first .* got 'lineraised'; did you mean 'linear"
    ):
        build(Tuning, {"mode": "lineraised"}, where="tuning")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0.0}, r"'epochs' must be above 0, got 0.0"),
        ({"lr": -1.0}, r"'lr' must be above 0 and at most 1000, got -1.0"),
        ({"lr": float("nan")}, r"'lr' must be above 0 and at most 1000, got nan"),
        ({"head_lr": float("inf")}, r"'head_lr' must be above 0 and at most 1000, got inf"),
        ({"batch": 0}, r"'batch' must be at least 1, got 0"),
        ({"rank": 0}, r"'rank' must be at least 1, got 0"),
        ({"clip": -0.1}, r"'clip' must be 0 or more, got -0.1"),
        ({"warmup": 1.0}, r"'warmup' must be 0 or more and below 1, got 1.0"),
        ({"steps": 0}, r"'steps' must be at least 1, or nothing for no cap, got 0"),
    ],
)
def test_values_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Tuning(**wrong)


def test_zero_turns_things_off() -> None:
    off = dict.fromkeys(("clip", "warmup", "weight_decay", "head_epochs", "penalty"), 0.0)
    made = asdict(Tuning(**off))  # type: ignore[arg-type]
    assert {name: made[name] for name in off} == off
