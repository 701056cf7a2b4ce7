"""Measuring merged models: subjects x tasks x protocols x shots x seeds, one record each.

A *subject* is what is scored under one name: for every task an output folder (a merge has one for all tasks; the
experts, a reference, have one each). Features are made once for each encoder, task and split, and cached; protocols
only read them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from orthomerge.data.sampling import few_shot, share
from orthomerge.data.task import Examples, Split, Task
from orthomerge.errors import IncompatibleError, RecipeError, nearest
from orthomerge.evaluation.access import protocol_predictions
from orthomerge.evaluation.joint import joint_labels, joint_predictions
from orthomerge.evaluation.metrics import logits_of, scored, wilson
from orthomerge.evaluation.protocols import make_protocol
from orthomerge.features.cache import FeatureCache, FeatureKey, weights_digest
from orthomerge.features.extract import Precision, extract
from orthomerge.features.features import Features
from orthomerge.heads import Classifier, Head
from orthomerge.merged import Merged, load, load_head, read_manifest
from orthomerge.records import Access, Record

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor

__all__ = ["Bench", "Question", "Subject", "evaluate"]

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

    `subjects`: whom to ask; None for all.
    """

    protocol: str
    shots: Shots = None
    seeds: int = 1
    access: Access = "data-free"
    support: Split = "train"
    options: Mapping[str, Any] = field(default_factory=dict)
    subjects: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise RecipeError(f"'seeds' must be at least 1, got {self.seeds}")


@dataclass(frozen=True)
class Bench:
    """Tasks, how their inputs are read, and where features are kept. `teachers`: each task's expert."""

    tasks: Mapping[str, Task]
    processor: Processor
    teachers: Mapping[str, Path] = field(default_factory=dict)
    cache: FeatureCache = field(default_factory=FeatureCache)
    device: str = "auto"
    autocast: Precision = "float32"
    batch: int = 64
    progress: Callable[[str], None] = lambda text: None

    @cached_property
    def _loaded(self) -> dict[str, Merged]:
        """The encoder that was used last."""
        return {}

    @cached_property
    def _features(self) -> dict[tuple[Path, str, Split], Features]:
        """What is in memory of the subject that is being scored."""
        return {}

    @cached_property
    def _logits(self) -> dict[tuple[str, Split], torch.Tensor]:
        """The experts' logits, which every subject needs."""
        return {}

    def forget(self) -> None:
        """Let go of features in memory; they are in the cache."""
        self._features.clear()

    def head(self, model: Path, task: str) -> Head:
        """The head of a task in an output folder, whose labels must be the task's, in the same order."""
        found = load_head(model / "heads" / task)
        labels = self.tasks[task].labels
        numbered = tuple(f"LABEL_{number}" for number in range(len(labels)))
        if found.labels not in (labels, numbered):
            raise IncompatibleError(
                f"the head of {task!r} in {model} has other labels than the data, or another order; "
                "match the data's labels to the expert's first (orthomerge.data.reading.match_labels)"
            )
        return found

    def features(self, model: Path, task: str, split: Split) -> Features:
        """Features of one split under one encoder, from the cache if they were ever made."""
        if (model, task, split) in self._features:
            return self._features[model, task, split]
        examples = self.tasks[task][split]
        manifest = read_manifest(model)
        key = FeatureKey.of(
            examples,
            self.processor,
            weights=weights_digest(model),
            family=manifest["family"],
            pooling=manifest["pooling"],
            task=task,
            autocast=self.autocast,
        )
        found = self.cache.get_or_make(key, lambda: self._extract(model, task, examples))
        self._features[model, task, split] = found
        return found

    def teacher(self, task: str, split: Split) -> torch.Tensor:
        """The expert's logits on one split."""
        if task not in self.teachers:
            raise RecipeError(
                f"the expert of {task!r} is needed as teacher and was not given; give --expert {task}=PATH"
            )
        if (task, split) not in self._logits:
            expert = self.teachers[task]
            self._logits[task, split] = logits_of(self.head(expert, task), self.features(expert, task, split).values)
        return self._logits[task, split]

    def _extract(self, model: Path, task: str, examples: Examples) -> Features:
        self.progress(f"encoding {task}/{examples.split} with {model.name} ({len(examples)} inputs)")
        content = weights_digest(model)
        if content not in self._loaded:
            self._loaded.clear()  # one encoder at a time
            self._loaded[content] = load(model)
        return self.encode(self._loaded[content], task, examples)

    def encode(self, merged: Merged, task: str, examples: Examples) -> Features:
        """Features of some examples, made now."""
        return extract(
            merged.encoder,
            merged.family,
            merged.pooling,
            examples,
            self.processor,
            task=task,
            batch=self.batch,
            device=self.device,
            autocast=self.autocast,
        )


def evaluate(
    bench: Bench, subjects: Sequence[Subject], questions: Sequence[Question], *, suite: str | None = None
) -> Iterator[tuple[Record, torch.Tensor]]:
    """Records with the predictions they were counted from, subject by subject and task by task.

    Encoding goes one by one; the fits after it are small and run side by side, one thread each, so that their results
    do not depend on how many there are.
    """
    _check(bench, subjects)
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for subject in subjects:
            bench.forget()
            asked = [
                (task, question)
                for task in subject.models
                for question in questions
                if question.subjects is None or subject.name in question.subjects
            ]
            for task, question in asked:
                _gather(bench, subject, task, question)
            waiting = [pool.submit(_answer, bench, subject, task, question, suite) for task, question in asked]
            for answer in waiting:
                yield from answer.result()
            if len(set(subject.models.values())) == 1 and len(subject.models) > 1:
                yield from _joint(bench, subject, suite)


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


def _gather(bench: Bench, subject: Subject, task: str, question: Question) -> None:
    """Make all features that an answer will need, before threads ask for them."""
    needs = make_protocol(question.protocol, question.options).needs
    split: Split = question.support if needs and question.access == "inductive" else "test"
    bench.features(subject.models[task], task, "test")
    if needs:
        bench.features(subject.models[task], task, split)
    if "teacher" in needs:
        bench.teacher(task, split)


def _answer(
    bench: Bench, subject: Subject, task: str, question: Question, suite: str | None
) -> list[tuple[Record, torch.Tensor]]:
    found = []
    model = subject.models[task]
    protocol = make_protocol(question.protocol, question.options)
    access = question.access if protocol.needs else "data-free"
    test = bench.features(model, task, "test")
    head = bench.head(model, task)
    for seed in range(question.seeds if protocol.needs else 1):
        given: dict[str, Any] = {"seed": seed}
        if access == "inductive":
            places = _places(bench.tasks[task][question.support], question.shots, seed)
            given["support"] = bench.features(model, task, question.support).take(places)
            if "teacher" in protocol.needs:
                given["teacher"] = bench.teacher(task, question.support)[places]
        elif access != "data-free":
            if question.shots is not None:
                given["places"] = _places(bench.tasks[task]["test"], question.shots, seed)
            if "teacher" in protocol.needs:
                given["test_teacher"] = bench.teacher(task, "test")
        built: list[Classifier] = []
        predicted = protocol_predictions(protocol, head, access=access, test=test, watch=built.append, **given)
        record = _record(subject, task, predicted, test, suite)
        shown = replace(
            record,
            protocol=question.protocol,
            access=_wider(subject.access, access),
            seed=seed,
            shots=question.shots if protocol.needs else None,
            extra_parameters=max(map(_extra, built)),
        )
        found.append((shown, predicted))
    return found


def _extra(classifier: Classifier) -> int:
    """How many numbers a classifier keeps that a head does not: the anchors of `knn`, say."""
    if isinstance(classifier, Head):
        return 0
    return sum(value.numel() for value in vars(classifier).values() if isinstance(value, torch.Tensor))


def _joint(bench: Bench, subject: Subject, suite: str | None) -> Iterator[tuple[Record, torch.Tensor]]:
    """All labels in one space, the task unknown: is the merged model a general one?"""
    features = {task: bench.features(model, task, "test") for task, model in subject.models.items()}
    heads = {task: bench.head(model, task) for task, model in subject.models.items()}
    labels = joint_labels(features, heads)
    for task, predicted in joint_predictions(features, heads).items():
        test = replace(features[task], labels=labels[task])
        yield replace(_record(subject, task, predicted, test, suite), protocol="joint"), predicted


def _record(subject: Subject, task: str, predicted: torch.Tensor, test: Features, suite: str | None) -> Record:
    if test.labels is None:
        raise RecipeError(f"the test split of {task!r} has no labels; accuracy needs them")
    kept, truth = scored(predicted, test.labels)
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


def _places(examples: Examples, shots: Shots, seed: int) -> torch.Tensor:
    """Which inputs are support. Few shots are drawn class by class, which uses labels, as the papers do."""
    if shots is None:
        places = np.arange(len(examples))
    elif shots < 1:
        places = share(len(examples), shots, seed=seed)
    elif examples.labels is None:
        raise RecipeError(f"{shots} shots a class need labels to tell classes; give a share below 1, or all")
    else:
        places = few_shot(examples.labels, int(shots), seed=seed)
    return torch.from_numpy(np.asarray(places, dtype=np.int64))
