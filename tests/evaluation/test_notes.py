"""What makes a reader doubt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.evaluation.test_evaluate import Toy, make_toy

from orthomerge.data.task import Examples
from orthomerge.evaluation.notes import contamination_notes


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


def test_an_expert_that_knows_the_test_inputs(toy: Toy, tmp_path: Path) -> None:
    bench = toy.bench(tmp_path)
    assert contamination_notes(bench) == []
    # The expert is as good as ever on test; of the validation labels all are made wrong.
    task = toy.tasks["where"]
    val = task["val"]
    assert val.labels is not None
    wrong = Examples(val.inputs, (val.labels + 1) % 3, "val")
    tasks = {**toy.tasks, "where": replace(task, splits={**task.splits, "val": wrong})}
    (note,) = contamination_notes(replace(bench, tasks=tasks))
    assert note.startswith("the expert of 'where' scores ")
    assert note.endswith("it may have been trained on the test inputs")


def test_what_cannot_be_told_is_no_note(toy: Toy, tmp_path: Path) -> None:
    task = toy.tasks["where"]
    without = {name: part for name, part in task.splits.items() if name != "val"}
    nothing = Examples([], np.zeros(0, dtype=np.int64), "val")
    for splits in (without, {**task.splits, "val": task["val"].unlabelled()}, {**task.splits, "val": nothing}):
        bench = replace(toy.bench(tmp_path), tasks={**toy.tasks, "where": replace(task, splits=splits)})
        assert contamination_notes(bench) == []
    assert contamination_notes(replace(toy.bench(tmp_path), teachers={})) == []


def test_inputs_that_two_splits_share(toy: Toy, tmp_path: Path) -> None:
    task = toy.tasks["where"]
    test = task["test"]
    assert test.labels is not None
    inputs, count = list(test.inputs), len(test)
    assert contamination_notes(replace(toy.bench(tmp_path), teachers={})) == []
    mixed = Examples([*(list(task["train"].inputs)[:2]), *inputs[2:]], test.labels, "test")
    tasks = {**toy.tasks, "where": replace(task, splits={**task.splits, "test": mixed})}
    (note,) = contamination_notes(replace(toy.bench(tmp_path), tasks=tasks, teachers={}))
    assert note == (
        f"2 of {count} test inputs of 'where' are among those for training or validation: what is fitted there has "
        "seen them; take them out of one split"
    )
