"""AdaMerging: from task arithmetic at 0.3 to less entropy, a coefficient a task or a tensor, and trimmed vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orthomerge.fitting.adamerging import AdaMerging, elected
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


def test_the_trimmed_vectors_are_those_of_ties() -> None:
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


def test_plus_plus() -> None:
    setting = make_setting("bert")
    fitted = AdaMerging(vectors="ties", density=0.5, steps=4, batch=8, lr=0.01).fit(setting)
    vectors = elected(setting.task_vectors(), 0.5, elements=setting.layout.elements)
    expected = by_hand(setting, fitted.facts["coefficients"], vectors)
    torch.testing.assert_close(fitted.weights, expected, rtol=1e-5, atol=1e-6)
