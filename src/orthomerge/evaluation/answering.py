"""One question to one subject about one task, as a piece of work that any process can do.

A job names its features by their keys in the cache: what travels to a worker is small, and what a worker reads is what
was encoded. The fits are small and run with one thread each, here or elsewhere, so their results do not depend on how
many run side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from orthomerge.errors import CheckpointError, lost_worker
from orthomerge.evaluation.access import protocol_predictions
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.controls import bound, other_inputs, shuffled_teacher
from orthomerge.evaluation.metrics import UNSCORED, logits_of, predict
from orthomerge.evaluation.protocol import Evidence, Need, ReadingProtocol
from orthomerge.evaluation.protocols import make_protocol
from orthomerge.features.cache import FeatureCache, FeatureKey
from orthomerge.features.features import Features
from orthomerge.heads import Classifier, Head
from orthomerge.records import Access, Control

__all__ = ["Answer", "Job", "Load", "Submit", "answer", "extra_numbers", "reading", "working"]

Load = Callable[[FeatureKey], Features]
_KEPT = 6  # features that a worker keeps in memory


@dataclass(frozen=True)
class Job:
    """`head` is the subject's, `classifier` what reads it as it is, `expert_head` the expert's.

    `test`, `support`, `other` are keys of merged features, `expert_...` of the expert's on the same inputs; `places`
    and `other_places` are the rows of the support, seed by seed from `first` on (None: all).
    """

    protocol: str
    aligner: str | None
    options: Mapping[str, Any]
    access: Access
    control: Control | None
    head: Head
    classifier: Classifier
    test: FeatureKey
    seeds: int = 1
    first: int = 0
    together: bool = True
    expert_head: Head | None = None
    support: FeatureKey | None = None
    other: FeatureKey | None = None
    expert_test: FeatureKey | None = None
    expert_support: FeatureKey | None = None
    expert_other: FeatureKey | None = None
    places: tuple[torch.Tensor | None, ...] = ()
    other_places: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What one seed predicts; `extra`: numbers that inference needs beyond a head; `bound`: of a control."""

    seed: int
    predicted: torch.Tensor
    extra: int
    bound: float | None = None


def reading(protocol: str, aligner: str | None, options: Mapping[str, Any]) -> ReadingProtocol:
    """How features are read: by a protocol, or by the head that an aligner makes."""
    return make_protocol(protocol, options) if aligner is None else Aligned.by(aligner, options)


def answer(job: Job, load: Load) -> list[Answer]:
    """An answer for every seed."""
    way = reading(job.protocol, job.aligner, job.options)
    # An aligner starts from the expert's head. Read as it is, a model may be more than a head; `current` only calls it.
    head = job.head if way.needs else cast("Head", job.classifier)
    head = job.expert_head if job.aligner is not None and job.expert_head is not None else head
    seeds = range(job.first, job.first + (job.seeds if way.needs else 1))
    ways = dict.fromkeys(seeds, way)
    if isinstance(way, Aligned) and way.together and job.together and len(seeds) > 1 and job.access != "cross-fitted":
        noted = _Noted()
        for seed in seeds:
            _predicted(job, noted, head, seed, load)
        made = way.build_each(noted.evidence)
        ways = {seed: _Made(classifier) for seed, classifier in zip(seeds, made, strict=True)}
    return [_answered(job, ways[seed], head, seed, load) for seed in seeds]


def _answered(job: Job, way: ReadingProtocol, head: Head, seed: int, load: Load) -> Answer:
    predicted, built = _predicted(job, way, head, seed, load)
    test, limit = load(job.test), None
    if job.control is not None and test.labels is not None:
        kept = predicted != UNSCORED
        limit = bound(predicted[kept], predict(job.head, test.values)[kept], test.labels[kept])
    return Answer(seed, predicted, max(map(extra_numbers, built)), limit)


def _predicted(
    job: Job, way: ReadingProtocol, head: Head, seed: int, load: Load
) -> tuple[torch.Tensor, list[Classifier]]:
    """What one seed predicts, and the classifiers that were built for it."""
    given: dict[str, Any] = {"seed": seed, "spoil": lambda evidence: _spoilt(job, evidence, load)}
    if way.needs:
        given |= _support(job, way, seed, load)
    built: list[Classifier] = []
    access = job.access if way.needs else "data-free"
    predicted = protocol_predictions(way, head, access=access, test=load(job.test), watch=built.append, **given)
    return predicted, built


@dataclass(frozen=True)
class _Noted:
    """Builds nothing, but notes the evidence: for fits side by side, which all of it must be there for."""

    evidence: list[Evidence] = field(default_factory=list)
    needs: ClassVar[frozenset[Need]] = Aligned.needs

    def build(self, evidence: Evidence) -> Classifier:
        self.evidence.append(evidence)
        return evidence.head


@dataclass(frozen=True)
class _Made:
    """What was built before, under the checks of what is built now."""

    classifier: Classifier
    needs: ClassVar[frozenset[Need]] = Aligned.needs

    def build(self, evidence: Evidence) -> Classifier:
        return self.classifier


def _support(job: Job, way: ReadingProtocol, seed: int, load: Load) -> dict[str, Any]:
    """What the reading may see, as `protocol_predictions` wants it."""
    places = job.places[seed - job.first] if job.places else None
    inductive = job.access == "inductive"
    given: dict[str, Any] = {}
    if inductive and job.support is not None:
        given["support"] = _taken(load(job.support), places)
    elif places is not None:
        given["places"] = places
    seen = job.expert_support if inductive else job.expert_test
    if seen is None or job.expert_head is None:
        return given
    expert = load(seen)
    rows = _taken(expert, places) if inductive else expert
    if "teacher" in way.needs:
        given["teacher" if inductive else "test_teacher"] = logits_of(job.expert_head, rows.values)
    if "expert" in way.needs:
        given["expert" if inductive else "test_expert"] = rows
    return given


def _spoilt(job: Job, evidence: Evidence, load: Load) -> Evidence:
    """The evidence as the control makes it; without a control, as it is."""
    if job.control == "shuffled-teacher":
        return shuffled_teacher(evidence, seed=evidence.seed)
    if job.control == "other-task" and job.other is not None and job.expert_other is not None and job.expert_head:
        places = job.other_places[evidence.seed - job.first]
        expert = _taken(load(job.expert_other), places)
        teacher = None if evidence.teacher is None else logits_of(job.expert_head, expert.values)
        seen = None if evidence.expert is None else expert
        return other_inputs(evidence, support=_taken(load(job.other), places), teacher=teacher, expert=seen)
    return evidence


def _taken(features: Features, places: torch.Tensor | None) -> Features:
    return features if places is None else features.take(places)


def extra_numbers(classifier: Classifier) -> int:
    """How many numbers a classifier keeps that a head does not: the anchors of `knn`, the module of `surgery`."""
    if isinstance(classifier, Head):
        return 0
    tensors = getattr(classifier, "extra_tensors", None)
    kept = tensors() if tensors is not None else vars(classifier)
    return sum(value.numel() for value in kept.values() if isinstance(value, torch.Tensor))


Submit = Callable[[Job], Future[list[Answer]]]


@contextmanager
def working(workers: int, cache: FeatureCache, load: Load) -> Iterator[Submit]:
    """A way to have jobs done: here and at once with one worker, else in as many processes."""
    if workers <= 1:
        yield lambda job: _done(job, load)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (cache.folder,))
    try:
        yield lambda job: pool.submit(_work, job)
    except BrokenProcessPool as error:
        raise lost_worker() from error
    finally:
        pool.shutdown(cancel_futures=True)


def _done(job: Job, load: Load) -> Future[list[Answer]]:
    future: Future[list[Answer]] = Future()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        future.set_result(answer(job, load))
    finally:
        torch.set_num_threads(threads)
    return future


@dataclass
class _Here:
    """The cache that a worker reads."""

    folder: Path | None = field(default=None)


_HERE = _Here()


def _start(folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    _HERE.folder = folder


def _work(job: Job) -> list[Answer]:
    return answer(job, _load)


def _load(key: FeatureKey) -> Features:
    found = _read(key.digest, key)
    labels = None if key.labels is None else torch.tensor(key.labels, dtype=torch.int64)
    return Features(found.values, key.task, key.split, labels)


@lru_cache(maxsize=_KEPT)
def _read(digest: str, key: FeatureKey) -> Features:
    def missing() -> Features:
        raise CheckpointError(f"features {digest} of {key.task}/{key.split} left the cache {_HERE.folder}; run again")

    return FeatureCache(_HERE.folder).get_or_make(key, missing)
