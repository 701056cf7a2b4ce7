"""Measuring merged models: subjects x tasks x protocols x shots x seeds, one record each.

A *subject* is what is scored under one name: for every task an output folder (a merge has one for all tasks; the
experts, a reference, have one each). Features are made once for each encoder, task and split (`bench.py`); protocols
only read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthomerge.data.task import Split
from orthomerge.errors import RecipeError, nearest
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.answering import answers, extra_numbers
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.joint import joint_labels, joint_places, joint_predictions
from orthomerge.evaluation.metrics import scored, wilson
from orthomerge.evaluation.protocol import Need, ReadingProtocol
from orthomerge.evaluation.protocols import find_protocol, make_protocol
from orthomerge.features.cache import weights_digest
from orthomerge.records import Access, Record

__all__ = ["Bench", "Question", "Subject", "evaluate", "truth_of"]

Shots = int | float | None  # per class; a share of the split below 1; or all of it


@dataclass(frozen=True)
class Subject:
    """What is scored under one name. `access`: which inputs its making saw."""

    name: str
    models: Mapping[str, Path]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    access: Access = "data-free"


@dataclass(frozen=True)
class Question:
    """One way of reading: a protocol with its options, the support it gets, and how often it is repeated.

    `aligner`: read by the head that an aligner makes, whose options these then are; the protocol is `current`.
    `support` counts for inductive access: transductive access takes it from the test split. `subjects`: whom to ask;
    None for all. `fewer`: a class that has fewer than `shots` gives all it has. `first`: the first of the seeds.
    """

    protocol: str
    shots: Shots = None
    seeds: int = 1
    access: Access = "data-free"
    support: Split = "train"
    options: Mapping[str, Any] = field(default_factory=dict)
    subjects: tuple[str, ...] | None = None
    aligner: str | None = None
    fewer: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise RecipeError(f"'seeds' must be at least 1, got {self.seeds}")
        if self.first < 0:
            raise RecipeError(f"'first' must not be negative, got {self.first}")
        if self.aligner is not None and (self.protocol != "current" or self.access == "data-free"):
            raise RecipeError(
                f"aligner {self.aligner!r} makes the head that is read, from inputs: its protocol is 'current' and its "
                f"access inductive or transductive, got {self.protocol!r} and {self.access!r}"
            )
        if self.needs and self.access == "data-free":
            needs = ", ".join(sorted(self.needs))
            raise RecipeError(f"{self.protocol!r} needs {needs}, which does not go with 'data-free' access")
        if self.access == "inductive" and self.support == "test":
            raise RecipeError(
                "inductive support must come from another split than the scored one, got 'test' for both; "
                "ask for transductive access by name"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """What evidence the reading looks at."""
        return find_protocol(self.protocol).needs if self.aligner is None else Aligned.needs

    @property
    def reading(self) -> ReadingProtocol:
        """How features are read: by a protocol, or by the head that an aligner makes."""
        if self.aligner is None:
            return make_protocol(self.protocol, self.options)
        return Aligned.by(self.aligner, self.options)

    def asks(self, subject: Subject) -> bool:
        return self.subjects is None or subject.name in self.subjects

    def written(self, record: Record) -> Record:
        """A record with what this question says; a protocol that needs nothing says less."""
        if not self.needs:
            return replace(record, protocol=self.protocol, options=dict(self.options))
        return replace(
            record,
            protocol=self.protocol,
            options=dict(self.options),
            access=_wider(record.access, self.access),
            shots=self.shots,
            support="test" if self.access == "transductive" else self.support,
            aligner=self.aligner,
        )


def evaluate(
    bench: Bench,
    subjects: Sequence[Subject],
    questions: Sequence[Question],
    *,
    suite: str | None = None,
) -> Iterator[tuple[Record, torch.Tensor]]:
    """Records with the predictions they were counted from, subject by subject and task by task."""
    _check(bench, subjects)
    _check_questions(subjects, questions)
    for subject in subjects:
        bench.forget()
        for task, model in subject.models.items():
            truth = _labels(bench, task)
            for question in questions:
                if not question.asks(subject):
                    continue
                for answer in answers(bench, model, task, question):
                    record = question.written(_record(subject, task, answer.predicted, truth, suite))
                    yield replace(record, seed=answer.seed, extra_parameters=answer.extra), answer.predicted
        if len(subject.models) > 1 and len({weights_digest(model) for model in subject.models.values()}) == 1:
            yield from _joint(bench, subject, suite)


def truth_of(bench: Bench, subject: Subject, record: Record) -> torch.Tensor:
    """What the predictions behind a record should have been, in the label space that they are in."""
    first = 0
    if record.protocol == "joint":
        first = joint_places({task: len(bench.tasks[task].labels) for task in _ordered(bench, subject)})[record.task]
    return _labels(bench, record.task) + first


def _check(bench: Bench, subjects: Sequence[Subject]) -> None:
    """Rows of tables and files of predictions are told apart by the subject's name."""
    for name, count in Counter(subject.name for subject in subjects).items():
        if count > 1:
            raise RecipeError(f"{count} subjects are called {name!r}; give each a name of its own")
    for subject in subjects:
        for task in subject.models:
            if task not in bench.tasks:
                raise RecipeError(
                    f"{subject.name!r} has task {task!r}, but there is no data of it; {nearest(task, bench.tasks)}"
                )
            _labels(bench, task)


def _labels(bench: Bench, task: str) -> torch.Tensor:
    labels = bench.tasks[task]["test"].labels
    if labels is None:
        raise RecipeError(f"the test split of {task!r} has no labels; accuracy needs them")
    return torch.from_numpy(labels.astype(np.int64))


def _check_questions(subjects: Sequence[Subject], questions: Sequence[Question]) -> None:
    """No two answers may look the same."""
    blank = Record("", "", "", "accuracy", 0, 0, 0, 0, "data-free")
    for one, other in combinations(questions, 2):
        shared = [subject.name for subject in subjects if one.asks(subject) and other.asks(subject)]
        if shared and one.written(blank) == other.written(blank):
            raise RecipeError(
                f"two questions ask {shared[0]!r} for the same: {one.written(blank).way.title} "
                f"({one.written(blank).access}); ask once, or give them other options, shots or support"
            )


def _joint(bench: Bench, subject: Subject, suite: str | None) -> Iterator[tuple[Record, torch.Tensor]]:
    """All labels in one space, the task unknown: is the merged model a general one?"""
    models = {task: subject.models[task] for task in _ordered(bench, subject)}
    features = {task: bench.features(model, task, "test") for task, model in models.items()}
    heads = {task: bench.classifier(model, task) for task, model in models.items()}
    labels, extra = joint_labels(features, heads), sum(map(extra_numbers, heads.values()))
    for task, predicted in joint_predictions(features, heads).items():
        record = _record(subject, task, predicted, labels[task], suite)
        yield replace(record, protocol="joint", extra_parameters=extra), predicted


def _ordered(bench: Bench, subject: Subject) -> list[str]:
    """The subject's tasks in the bench's order, which makes the joint label space the same for all subjects."""
    return [task for task in bench.tasks if task in subject.models]


def _record(subject: Subject, task: str, predicted: torch.Tensor, labels: torch.Tensor, suite: str | None) -> Record:
    kept, truth = scored(predicted, labels)
    hits = int((kept == truth).sum())
    low, high = wilson(hits, len(truth))
    return Record(
        task=task,
        method=subject.name,
        protocol="",
        metric="accuracy",
        value=hits / len(truth),
        low=low,
        high=high,
        examples=len(truth),
        access=subject.access,
        parameters=dict(subject.parameters),
        suite=suite,
        inputs={"model": weights_digest(subject.models[task])},
    )


_WIDTH: dict[Access, int] = {"data-free": 0, "inductive": 1, "transductive": 2}


def _wider(one: Access, other: Access) -> Access:
    """What a number has seen is the most that any of its steps has seen."""
    return max(one, other, key=_WIDTH.__getitem__)
