"""One label space for all tasks: a hit needs the right task and the right class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.analysis.making import Toy
from tests.evaluation.making import CURRENT, average, encoded, only, scored

from orthomerge.data.task import Examples, Task
from orthomerge.evaluation.answers import joint_predictions
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Subject, evaluate
from orthomerge.models.features import Features
from orthomerge.models.heads import Head, Linear, head_of

ONE = Head(Linear(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), ("left", "right"))
TWO = Head(Linear(torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, -3.0]])), ("up", "level", "down"))
HEADS = {"one": ONE, "two": TWO}


class Given(EncodedTasks):
    """Features that no encoder had to compute, and heads of no model."""

    def features(self, model: Any, task: str, split: Any, *, reader: Head | None = None) -> Features:
        return Features(torch.tensor(self.tasks[task][split].inputs), task, split)

    def classifier(self, model: Any, task: str) -> Head:
        return HEADS[task]


def features(name: str, inputs: list[list[float]], labels: list[int]) -> Task:
    test = Examples(inputs, np.array(labels, dtype=np.int64), "test")
    return Task(name, HEADS[name].labels, "text", {"test": test})


def test_by_hand() -> None:
    # Logits of `one`, then of `two`:
    #   (5, 1):    5 -5 |  3  0 -3   -> place 0 = left
    #   (-2, 1):  -2  2 |  3  0 -3   -> place 2 = up: right within `one`, but the wrong task
    #   (1, -2):   1 -1 | -6  0  6   -> place 4 = down
    #   (0.5, 0): .5 -.5|  0  0  0   -> place 0 = left: the wrong task for `two`
    one, two = features("one", [[5.0, 1.0], [-2.0, 1.0]], [0, 1]), features("two", [[1.0, -2.0], [0.5, 0.0]], [2, 1])
    tasks, models = Given({"one": one, "two": two}), dict.fromkeys(HEADS)
    found = joint_predictions(tasks, models)  # type: ignore[arg-type]
    assert {task: (predicted.tolist(), truth.tolist()) for task, predicted, truth in found} == {
        "one": ([0, 2], [0, 1]),
        "two": ([4, 0], [4, 3]),
    }


def test_joint_goes_by_content_and_not_by_object(toy: Toy) -> None:
    """Multi-task training gives one encoder in a model per task."""
    models = {task: average(toy).models[task] for task in reversed(toy.tasks)}
    assert models["where"].encoder is not models["bright"].encoder
    mtl = Subject("mtl", {task: model.with_heads({task: model.head(task)}) for task, model in models.items()})
    scores = scored(toy, [mtl, average(toy)])
    for task in toy.tasks:
        (item,) = only(scores, method="mtl", protocol="joint", task=task)
        (same,) = only(scores, method="average", protocol="joint", task=task)
        assert (
            item.predictions.predicted == same.predictions.predicted
        ).all()  # in one label space, whatever the order of the tasks
        assert (item.predictions.truth == same.predictions.truth).all()


def test_joint_with_heads_that_read_the_encoder_in_different_ways(toy: Toy) -> None:
    """Every head reads every input in its own way."""
    model = average(toy).models["where"]
    heads = {"bright": replace(head_of(model.heads["bright"]), pooling="mean"), "where": model.heads["where"]}
    mixed, tasks = model.with_heads(heads), encoded(toy)
    joint = only(list(evaluate([Subject.of(mixed, toy.tasks)], [CURRENT], tasks)), protocol="joint")
    for item in joint:
        task = item.record.task
        parts = [head(tasks.features(mixed, task, "test", reader=head_of(head)).values) for head in heads.values()]
        assert item.predictions.predicted.tolist() == torch.cat(parts, 1).argmax(1).tolist()
    (plain,) = only(scored(toy, [average(toy)]), protocol="joint", task="bright")
    (other,) = only(joint, task="bright")
    assert (plain.predictions.predicted != other.predictions.predicted).any()
