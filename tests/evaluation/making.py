"""Subjects and encoded tasks of the toy in `tests/analysis/making.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tests.analysis.making import Toy

from orthomerge.api.merge import merge
from orthomerge.data.task import Split, Task
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Scored, Subject, evaluate
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.models.encoding import Encoding
from orthomerge.models.model import Model

CHEAP: dict[str, Any] = {"epochs": 2}
CURRENT = EvaluationProtocol("current")
PROTOCOLS = (
    CURRENT,
    EvaluationProtocol("knn", shots=2, seeds=2),
    EvaluationProtocol("aligned-c", CHEAP, shots=0.5, seeds=2),
    EvaluationProtocol("aligned-c", CHEAP),
    EvaluationProtocol("probe", {"steps": 5}),
    EvaluationProtocol("knn", shots=3, access="transductive"),
    EvaluationProtocol("aligned-c", CHEAP, access="transductive"),
)


def encoded(
    toy: Toy,
    *,
    how: Encoding | None = None,
    tasks: Mapping[str, Task] | None = None,
    teachers: Mapping[str, Model] | None = None,
) -> EncodedTasks:
    experts = toy.experts.sources if teachers is None else teachers
    return EncodedTasks(toy.tasks if tasks is None else tasks, experts, how or toy.encoding)


def experts(toy: Toy) -> Subject:
    return Subject("expert", toy.experts.sources)


def average(toy: Toy, **more: Any) -> Subject:
    return replace(Subject.of(merge(toy.experts, method="average"), toy.tasks), **more)


def total(toy: Toy, **more: Any) -> Subject:
    return replace(Subject.of(merge(toy.experts, method="task_arithmetic", scale=1.0), toy.tasks), **more)


def scored(
    toy: Toy, subjects: Sequence[Subject], protocols: Sequence[EvaluationProtocol] = (CURRENT,), **more: Any
) -> list[Scored]:
    return list(evaluate(subjects, protocols, encoded(toy, **more)))


def only(scores: Sequence[Scored], **wanted: Any) -> list[Scored]:
    """Those whose records have these values."""
    return [item for item in scores if all(getattr(item.record, key) == value for key, value in wanted.items())]


def same_predictions(one: Scored, other: Scored) -> bool:
    return np.array_equal(one.predictions.predicted, other.predictions.predicted)


def without_labels(toy: Toy, split: Split) -> dict[str, Task]:
    return {
        name: replace(task, splits={**task.splits, split: task[split].unlabelled()}) for name, task in toy.tasks.items()
    }


def with_wrong_labels(toy: Toy, name: str, split: Split) -> dict[str, Task]:
    """All labels of one split of a task moved on by one class."""
    task, part = toy.tasks[name], toy.tasks[name][split]
    assert part.labels is not None
    wrong = replace(part, labels=(part.labels + 1) % len(task.labels))
    return {**toy.tasks, name: replace(task, splits={**task.splits, split: wrong})}
