"""One label space for all tasks: a hit needs the right task and the right class."""

from __future__ import annotations

import pytest
import torch

from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.evaluation.joint import joint_labels, joint_predictions
from orthomerge.models.features import Features
from orthomerge.models.heads import Head, Linear

ONE = Head(Linear(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), ("left", "right"))
TWO = Head(Linear(torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, -3.0]])), ("up", "level", "down"))
HEADS = {"one": ONE, "two": TWO}


def features(task: str, values: list[list[float]], labels: list[int] | None) -> Features:
    return Features(torch.tensor(values), task, "test", None if labels is None else torch.tensor(labels))


# Logits of `one`, then of `two`:
#   (5, 1):    5 -5 |  3  0 -3   -> place 0 = left
#   (-2, 1):  -2  2 |  3  0 -3   -> place 2 = up: right within `one`, but the wrong task
#   (1, -2):   1 -1 | -6  0  6   -> place 4 = down
#   (0.5, 0): .5 -.5|  0  0  0   -> place 0 = left: the wrong task for `two`
FEATURES = {
    "one": features("one", [[5.0, 1.0], [-2.0, 1.0]], [0, 1]),
    "two": features("two", [[1.0, -2.0], [0.5, 0.0]], [2, 1]),
}


def test_by_hand() -> None:
    assert {task: places.tolist() for task, places in joint_predictions(FEATURES, HEADS).items()} == {
        "one": [0, 2],
        "two": [4, 0],
    }
    assert {task: places.tolist() for task, places in joint_labels(FEATURES, HEADS).items()} == {
        "one": [0, 1],
        "two": [4, 3],
    }


def test_no_input_is_lost_between_blocks() -> None:
    many = features("two", [[0.0, 1.0]] * 10_001, [0] * 10_001)
    assert joint_predictions({"two": many}, HEADS)["two"].equal(joint_labels({"two": many}, HEADS)["two"])


def test_a_task_without_classifier() -> None:
    with pytest.raises(IncompatibleError, match="there is no classifier for 'two'"):
        joint_predictions(FEATURES, {"one": ONE})


def test_no_task() -> None:
    with pytest.raises(IncompatibleError, match="needs at least one task"):
        joint_labels({}, HEADS)


def test_no_labels() -> None:
    with pytest.raises(RecipeError, match="needs labels of the scored inputs, but 'one' has none"):
        joint_labels({"one": features("one", [[0.0, 0.0]], None)}, HEADS)
