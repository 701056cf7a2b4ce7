"""Analogies: worked out by hand on two weights, and the same as real merges on a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evaluation.test_evaluate import Toy, make_toy
from tests.evaluation.test_negation import Pairs, by_hand, task_of, threshold

from orthomerge import merge
from orthomerge.data.task import Split
from orthomerge.errors import RecipeError
from orthomerge.evaluation.analogy import Analogy, Form, Point, analogy_span, combined, search_analogy
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.metrics import accuracy, predict, wilson

# `no` as long as the first weight is at most 0.5, `yes` as soon as the second is more.
VAL = ([[1.0, 0.0], [0.0, 1.0]], [0, 1])
TEST = ([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0, 0, 0, 1])
TASK = task_of("d", {"val": VAL, "test": TEST})
GRID = (0.25, 0.75, 1.0)


def searched(**more: Any) -> Analogy:
    """Weights (scale, shift)."""
    plane = by_hand((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    return search_analogy(
        plane, Bench({"d": TASK}, Pairs(), device="cpu"), threshold(1, 1), task="d", **{"grid": GRID, **more}
    )


def test_by_hand_with_one_coefficient() -> None:
    said: list[str] = []
    found = searched(say=said.append)
    # One half is right on either side of 0.5, so the base is as good as anything.
    assert found.curve == tuple(Point(scale, scale, 0.5) for scale in (0.0, *GRID))
    assert found.best == Point(0.0, 0.0, 0.5)
    assert said[2] == "scale 0.75, shift 0.75: 50.0"
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
        bench = Bench({"d": blind}, Pairs(), device="cpu")
        with pytest.raises(RecipeError, match=f"{split} split of 'd' has no labels"):
            search_analogy(by_hand((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), bench, threshold(1, 1), task="d")


def test_how_an_analogy_is_written() -> None:
    assert Form.parse("king:queen::man") == Form("king", "queen", "man")
    assert Form.parse(" a : b :: c ") == Form("a", "b", "c")
    for wrong in ("", "a:b", "a:b:c", "a::b", "a:b::", ":b::c", "a:b::c:d", "a:b::c::d"):
        with pytest.raises(RecipeError, match=r"an analogy is written a:b::c .*, got"):
            Form.parse(wrong)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


def test_the_recipe(toy: Toy) -> None:
    recipe = replace(toy.recipe("ties"), experts={name: name for name in "abcx"})
    made = combined(recipe, Form("a", "b", "c"), scale=0.5, shift=0.2)
    assert made.parameters == {"scale": {"a": -0.2, "b": 0.2, "c": 0.5, "x": 0.0}}
    made = combined(recipe, Form("a", "b", "a"), scale=0.5, shift=0.2)
    assert made.parameters["scale"] == pytest.approx({"a": 0.3, "b": 0.2, "c": 0.0, "x": 0.0})
    with pytest.raises(RecipeError, match="task vector of 'd' is wanted, but its expert was not given"):
        combined(recipe, Form("a", "d", "c"), scale=1.0, shift=1.0)


def test_the_curve_is_that_of_real_merges(toy: Toy, tmp_path: Path) -> None:
    form, recipe = Form("bright", "where", "bright"), toy.recipe("ties")
    plane = analogy_span(recipe, form, tmp_path / "span")
    bench = toy.bench(tmp_path / "cache")
    head = bench.head(toy.folder / "out" / "sum", "bright")
    found = search_analogy(plane, bench, head, task="bright", grid=(0.4, 1.0), independent=True)

    def measured(out: Path, split: Split) -> float:
        labels = torch.tensor(toy.tasks["bright"][split].labels)
        return accuracy(predict(head, bench.features(out, "bright", split).values), labels)

    assert len(found.curve) == 9
    for point in found.curve:
        out = tmp_path / f"{point.scale}-{point.shift}"
        merge(combined(recipe, form, scale=point.scale, shift=point.shift), out=out)
        assert point.accuracy == pytest.approx(measured(out, "val"))
    assert found.edited.value == pytest.approx(measured(tmp_path / f"{found.best.scale}-{found.best.shift}", "test"))
    assert found.base.value == pytest.approx(measured(tmp_path / "0.0-0.0", "test"))
    # Fine-tuned on C is C's expert, which here is the task's own.
    assert found.expert is not None
    assert found.auxiliary == found.expert
