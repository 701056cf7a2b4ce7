"""Measuring merged models: subjects x tasks x protocols x shots x seeds, one record each.

A *subject* is what is scored under one name: for every task an output folder (a merge has one for all tasks; the
experts, a reference, have one each). Features are made once for each encoder, task and split (`bench.py`); protocols
only read them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthomerge.data.sampling import few_shot, share
from orthomerge.data.task import Examples, Split
from orthomerge.errors import RecipeError, nearest
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.answering import Answer, Job, extra_numbers, working
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.controls import check_control
from orthomerge.evaluation.joint import joint_labels, joint_places, joint_predictions
from orthomerge.evaluation.metrics import scored, wilson
from orthomerge.evaluation.protocol import Need
from orthomerge.evaluation.protocols import find_protocol
from orthomerge.features.cache import weights_digest
from orthomerge.records import Access, Control, Record, Support

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
    `support` counts for inductive access: the others take theirs from the test split. `control` spoils the evidence on
    purpose. `subjects`: whom to ask; None for all. `fewer`: a class that has fewer than `shots` gives all it has.
    `first`: the first of the seeds. `together`: fits of several draws may go side by side, which changes last digits.
    """

    protocol: str
    shots: Shots = None
    seeds: int = 1
    access: Access = "data-free"
    support: Split = "train"
    options: Mapping[str, Any] = field(default_factory=dict)
    subjects: tuple[str, ...] | None = None
    control: Control | None = None
    aligner: str | None = None
    fewer: bool = False
    first: int = 0
    together: bool = True

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise RecipeError(f"'seeds' must be at least 1, got {self.seeds}")
        if self.first < 0:
            raise RecipeError(f"'first' must not be negative, got {self.first}")
        if self.aligner is not None and (self.protocol != "current" or self.access == "data-free"):
            raise RecipeError(
                f"aligner {self.aligner!r} makes the head that is read, from inputs: its protocol is 'current' and its "
                f"access inductive, cross-fitted or transductive, got {self.protocol!r} and {self.access!r}"
            )
        if self.control is not None:
            name = self.aligner or self.protocol
            check_control(self.control, protocol=name, needs=self.needs, access=self.access)

    @property
    def needs(self) -> frozenset[Need]:
        """What evidence the reading looks at."""
        return find_protocol(self.protocol).needs if self.aligner is None else Aligned.needs

    def asks(self, subject: Subject) -> bool:
        return self.subjects is None or subject.name in self.subjects

    def written(self, record: Record) -> Record:
        """A record with what this question says; a protocol that needs nothing says less."""
        if not self.needs:
            return replace(record, protocol=self.protocol, options=dict(self.options))
        places: dict[Access, Support] = {"cross-fitted": "folds", "transductive": "test"}
        return replace(
            record,
            protocol=self.protocol,
            options=dict(self.options),
            access=_wider(record.access, self.access),
            shots=self.shots,
            support=places.get(self.access, self.support),
            control=self.control,
            aligner=self.aligner,
        )


def evaluate(
    bench: Bench,
    subjects: Sequence[Subject],
    questions: Sequence[Question],
    *,
    suite: str | None = None,
    workers: int = 1,
) -> Iterator[tuple[Record, torch.Tensor]]:
    """Records with the predictions they were counted from, subject by subject and task by task.

    Encoding goes one by one; the fits after it are done here or, with more `workers`, in processes while the next
    subject is encoded. A script that asks for processes must start under `if __name__ == "__main__"`.
    """
    _check(bench, subjects)
    _check_questions(bench, subjects, questions)
    with working(workers, bench.cache, bench.by_key) as submit:
        waiting: deque[Iterator[tuple[Record, torch.Tensor]]] = deque()
        for subject in subjects:
            bench.forget()
            asked = [(task, question) for task in subject.models for question in questions if question.asks(subject)]
            answers = [submit(_job(bench, subject, task, question)) for task, question in asked]
            joint = []
            if len(subject.models) > 1 and len({weights_digest(model) for model in subject.models.values()}) == 1:
                joint = list(_joint(bench, subject, suite))
            waiting.append(chain(_records(bench, subject, asked, answers, suite), joint))
            if workers <= 1:
                yield from waiting.popleft()
        for records in waiting:
            yield from records


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


def _check_questions(bench: Bench, subjects: Sequence[Subject], questions: Sequence[Question]) -> None:
    """No two answers may look the same, and every control must have what it needs, before any work is done."""
    blank = Record("", "", "", "accuracy", 0, 0, 0, 0, "data-free")
    for one, other in combinations(questions, 2):
        shared = [subject.name for subject in subjects if one.asks(subject) and other.asks(subject)]
        if shared and one.written(blank) == other.written(blank):
            raise RecipeError(
                f"two questions ask {shared[0]!r} for the same: {one.written(blank).way.title} "
                f"({one.written(blank).access}); ask once, or give them other options, shots or support"
            )
    for question in questions:
        if question.control == "other-task":
            for subject in filter(question.asks, subjects):
                for task in subject.models:
                    bench.other(task, question.support)


def _job(bench: Bench, subject: Subject, task: str, question: Question) -> Job:
    """All that an answer needs, encoded now if it never was."""
    model, needs = subject.models[task], question.needs
    inductive = question.access == "inductive"
    keys: dict[str, Any] = {"test": bench.made(model, task, "test")}
    given: dict[str, Any] = {"seeds": question.seeds, "first": question.first, "together": question.together}
    drawn = range(question.first, question.first + question.seeds)
    if needs:
        split: Split = question.support if inductive else "test"
        examples = bench.tasks[task][split]
        if inductive:
            keys["support"] = bench.made(model, task, split)
        given["places"] = tuple(_rows(examples, question, seed) for seed in drawn)
        if needs & {"teacher", "expert"}:
            expert = bench.teacher_of(task)
            given["expert_head"] = bench.head(expert, task)
            keys["expert_support" if inductive else "expert_test"] = bench.made(expert, task, split)
            if question.control == "other-task":
                other = bench.other(task, split)
                keys["other"], keys["expert_other"] = bench.made(model, other, split), bench.made(expert, other, split)
                rows = bench.tasks[other][split]
                given["other_places"] = tuple(_rows(rows, question, seed) for seed in drawn)
    return Job(
        question.protocol,
        question.aligner,
        question.options,
        question.access,
        question.control,
        bench.head(model, task),
        bench.classifier(model, task),
        **keys,
        **given,
    )


def _records(
    bench: Bench,
    subject: Subject,
    asked: Sequence[tuple[str, Question]],
    answers: Sequence[Future[list[Answer]]],
    suite: str | None,
) -> Iterator[tuple[Record, torch.Tensor]]:
    for (task, question), future in zip(asked, answers, strict=True):
        truth = _labels(bench, task)
        for found in future.result():
            record = question.written(_record(subject, task, found.predicted, truth, suite))
            record = replace(record, seed=found.seed, extra_parameters=found.extra, bound=found.bound)
            yield record, found.predicted


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


_WIDTH: dict[Access, int] = {"data-free": 0, "inductive": 1, "cross-fitted": 2, "transductive": 3}


def _wider(one: Access, other: Access) -> Access:
    """What a number has seen is the most that any of its steps has seen."""
    return max(one, other, key=_WIDTH.__getitem__)


def _rows(examples: Examples, question: Question, seed: int) -> torch.Tensor | None:
    """Which inputs are support (None: all). Few shots are drawn class by class, which uses labels, as in the papers."""
    shots = question.shots
    if shots is None:
        return None
    if shots < 1:
        places = share(len(examples), shots, seed=seed)
    elif examples.labels is None:
        raise RecipeError(f"{shots} shots a class need labels to tell classes; give a share below 1, or all")
    else:
        places = few_shot(examples.labels, int(shots), seed=seed, allow_fewer=question.fewer)
    return torch.from_numpy(np.asarray(places, dtype=np.int64))
