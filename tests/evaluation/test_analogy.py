"""Analogies: worked out by hand on two weights, and the same as real merges on a small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.analysis.making import Toy
from tests.evaluation.making import encoded
from tests.evaluation.test_editing import by_hand, pairs_of, task_of, threshold
from tests.evaluation.test_scale import Said

from orthomerge.api.analogy import analogy
from orthomerge.api.open import open as open_experts
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Split
from orthomerge.evaluation.editing import Analogy, AnalogyPoint, Form, search_analogy
from orthomerge.evaluation.metrics import counted, predict, wilson
from orthomerge.evaluation.span import arithmetic

# `no` as long as the first weight is at most 0.5, `yes` as soon as the second is more.
VAL = ([[1.0, 0.0], [0.0, 1.0]], [0, 1])
TEST = ([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0, 0, 0, 1])
TASK = task_of("d", {"val": VAL, "test": TEST})
GRID = (0.25, 0.75, 1.0)


def searched(**more: Any) -> Analogy:
    """Weights (scale, shift)."""
    plane = by_hand((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    return search_analogy(plane, threshold(1, 1), pairs_of(TASK), task="d", **{"grid": GRID, **more})


def test_by_hand_with_one_coefficient() -> None:
    said = Said()
    found = searched(progress=said, title="a:b::c")
    # One half is right on either side of 0.5, so the base is as good as anything.
    assert found.curve == tuple(AnalogyPoint(scale, scale, 0.5) for scale in (0.0, *GRID))
    assert found.best == AnalogyPoint(0.0, 0.0, 0.5)
    assert said.stages[2] == "a:b::c: scale 0.75, shift 0.75: 50.0"
    assert (found.base.value, found.auxiliary.value, found.unscaled.value) == (0.75, 0.0, 0.25)
    assert found.edited == found.base
    assert (found.base.low, found.base.high) == wilson(3, 4)
    assert found.expert is None


def test_by_hand_with_two() -> None:
    found = searched(independent=True)
    assert len(found.curve) == 16
    assert {(point.scale, point.shift) for point in found.curve if point.accuracy == 1.0} == {
        (scale, shift) for scale in (0.0, 0.25) for shift in (0.75, 1.0)
    }
    assert (found.best.scale, found.best.shift) == (0.0, 0.75)
    assert found.edited.value == 1.0
    assert found.unscaled.value == 0.25


def test_mistakes() -> None:
    with pytest.raises(RecipeError, match="positive numbers, got 0"):
        searched(grid=(0, 1))
    for split in ("val", "test"):
        blind = replace(TASK, splits={**TASK.splits, split: TASK[split].unlabelled()})
        plane = by_hand((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
        with pytest.raises(RecipeError, match=f"{split} split of 'd' has no labels"):
            search_analogy(plane, threshold(1, 1), pairs_of(blind), task="d")


def test_how_an_analogy_is_written() -> None:
    assert Form.parse("king:queen::man") == Form("king", "queen", "man")
    assert Form.parse(" a : b :: c ") == Form("a", "b", "c")
    for wrong in ("", "a:b", "a:b:c", "a::b", "a:b::", ":b::c", "a:b::c:d", "a:b::c::d"):
        with pytest.raises(RecipeError, match=r"an analogy is written a:b::c .*, got"):
            Form.parse(wrong)


def test_the_coefficients() -> None:
    assert Form("a", "b", "c").coefficients(0.5, 0.2) == {"a": -0.2, "b": 0.2, "c": 0.5}
    assert Form("a", "b", "a").coefficients(0.5, 0.2) == pytest.approx({"a": 0.3, "b": 0.2})


def test_the_curve_is_that_of_real_merges(toy: Toy) -> None:
    form, tasks = Form("bright", "where", "bright"), encoded(toy, tasks={"fourth": toy.tasks["bright"]})
    experts = open_experts(
        {**{task: toy.folder / task for task in toy.tasks}, "fourth": toy.folder / "bright"}, base=toy.folder / "base"
    )
    result = analogy(
        experts, form, "fourth", toy.tasks["bright"], grid=(0.4, 1.0), independent=True, encoding=toy.encoding
    )
    found, head = result.search, experts.heads["bright"]

    def measured(scale: float, shift: float, split: Split) -> float:
        model = arithmetic(experts, form.coefficients(scale, shift))
        labels = torch.tensor(toy.tasks["bright"][split].labels)
        return counted(predict(head, tasks.features(model, "fourth", split).values), labels).value

    assert len(found.curve) == 9
    for point in found.curve:
        assert point.accuracy == pytest.approx(measured(point.scale, point.shift, "val"))
    assert found.edited.value == pytest.approx(measured(found.best.scale, found.best.shift, "test"))
    assert found.base.value == pytest.approx(measured(0.0, 0.0, "test"))
    # Fine-tuned on C is C's expert, which here is the task's own.
    assert found.expert is not None
    assert found.auxiliary == found.expert
    assert result.model is not None
    assert result.model.tasks == ("bright", "where", "fourth")


def test_what_is_no_analogy(toy: Toy) -> None:
    with pytest.raises(RecipeError, match="task vector of 'd' is wanted, but its expert was not given"):
        analogy(toy.experts, "bright:d::where", "fourth", toy.tasks["where"])
    with pytest.raises(RecipeError, match="'where' is one of the three of the analogy; give it a new name"):
        analogy(toy.experts, "bright:where::bright", "where", toy.tasks["where"])
