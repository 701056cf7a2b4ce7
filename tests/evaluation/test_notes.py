"""What makes a reader doubt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.analysis.making import Toy
from tests.evaluation.making import encoded, with_wrong_labels

from orthomerge.data.task import Examples
from orthomerge.evaluation.evaluate import contamination_notes


def test_an_expert_that_knows_the_test_inputs(toy: Toy) -> None:
    assert contamination_notes(encoded(toy)) == []
    # The expert is as good as ever on test; of the validation labels all are made wrong.
    (note,) = contamination_notes(encoded(toy, tasks=with_wrong_labels(toy, "where", "val")))
    assert note.startswith("the expert of 'where' scores ")
    assert note.endswith("it may have been trained on the test inputs")


def test_what_cannot_be_told_is_no_note(toy: Toy) -> None:
    task = toy.tasks["where"]
    without = {name: part for name, part in task.splits.items() if name != "val"}
    nothing = Examples([], np.zeros(0, dtype=np.int64), "val")
    for splits in (without, {**task.splits, "val": task["val"].unlabelled()}, {**task.splits, "val": nothing}):
        tasks = {**toy.tasks, "where": replace(task, splits=splits)}
        assert contamination_notes(encoded(toy, tasks=tasks)) == []
    assert contamination_notes(encoded(toy, teachers={})) == []


def test_inputs_that_two_splits_share(toy: Toy) -> None:
    task = toy.tasks["where"]
    test = task["test"]
    assert test.labels is not None
    inputs, count = list(test.inputs), len(test)
    mixed = Examples([*(list(task["train"].inputs)[:2]), *inputs[2:]], test.labels, "test")
    tasks = {**toy.tasks, "where": replace(task, splits={**task.splits, "test": mixed})}
    (note,) = contamination_notes(encoded(toy, tasks=tasks, teachers={}))
    assert note == (
        f"2 of {count} test inputs of 'where' are among those for training or validation: what is fitted there has "
        "seen them; take them out of one split"
    )
