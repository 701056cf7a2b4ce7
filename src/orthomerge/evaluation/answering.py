"""One question about one task of a model: evidence first, then a classifier, then predictions.

Evidence is what the question's access allows: nothing, inputs of another split, or the scored inputs themselves,
without their labels. A protocol that needs labels is never scored on an input whose label it was shown. Encoding uses
all threads; fits are small and run with one, so that a result does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from orthomerge.data.sampling import few_shot, share
from orthomerge.data.task import Examples, Split
from orthomerge.errors import RecipeError
from orthomerge.evaluation.evidence import evidence_for
from orthomerge.evaluation.metrics import UNSCORED, logits_of, predict
from orthomerge.evaluation.protocol import Evidence, ReadingProtocol
from orthomerge.features.features import Features
from orthomerge.heads import Classifier, Head
from orthomerge.merging.stream import single_threaded

if TYPE_CHECKING:
    from orthomerge.evaluation.bench import Bench
    from orthomerge.evaluation.evaluate import Question

__all__ = ["Answer", "answers", "extra_numbers"]


@dataclass(frozen=True)
class Answer:
    """The predicted class [n] of every test input for one seed; `extra`: numbers that inference needs beyond a head."""

    seed: int
    predicted: torch.Tensor
    extra: int


@dataclass(frozen=True)
class _Support:
    """Inputs that evidence is drawn from, as the model and the task's expert encode them."""

    examples: Examples
    merged: Features
    expert: Features | None = None
    expert_head: Head | None = None


def answers(bench: Bench, model: Path, task: str, question: Question) -> list[Answer]:
    """One answer per draw of support inputs; one in all where the protocol needs none."""
    protocol, test = question.reading, bench.features(model, task, "test")
    if not protocol.needs:
        # Unchanged, a model may be more than a head.
        classifier = protocol.build(Evidence(cast("Head", bench.classifier(model, task))))
        with single_threaded():
            return [Answer(question.first, predict(classifier, test.values), extra_numbers(classifier))]
    support = _support(bench, model, task, question, protocol)
    # An aligner starts from the expert's head.
    head = support.expert_head if question.aligner is not None else None
    head = head or bench.head(model, task)
    with single_threaded():
        return list(_answers(question, protocol, head, support, test))


def extra_numbers(classifier: Classifier) -> int:
    """How many numbers a classifier keeps that a head does not: the anchors of `knn`, the module of `surgery`."""
    if isinstance(classifier, Head):
        return 0
    tensors = getattr(classifier, "extra_tensors", None)
    kept = tensors() if tensors is not None else vars(classifier)
    return sum(value.numel() for value in kept.values() if isinstance(value, torch.Tensor))


def _answers(
    question: Question, protocol: ReadingProtocol, head: Head, support: _Support, test: Features
) -> Iterator[Answer]:
    shown = "labels" in protocol.needs and question.access == "transductive"
    for seed in range(question.first, question.first + question.seeds):
        rows = _rows(support.examples, question, seed)
        if shown and (rows is None or len(rows) >= len(test)):
            raise RecipeError(
                "a protocol that needs labels cannot be scored on the inputs whose labels it was shown: of "
                f"{len(test)} inputs 0 would remain; take a part of them as support"
            )
        classifier = protocol.build(_evidence(protocol, head, support, rows, seed))
        predicted = predict(classifier, test.values)
        if shown and rows is not None:
            predicted[rows] = UNSCORED
        yield Answer(seed, predicted, extra_numbers(classifier))


def _support(bench: Bench, model: Path, task: str, question: Question, protocol: ReadingProtocol) -> _Support:
    """The inputs that the question's access allows, encoded now if they never were."""
    split: Split = question.support if question.access == "inductive" else "test"
    examples, merged = bench.tasks[task][split], bench.features(model, task, split)
    if not protocol.needs & {"teacher", "expert"}:
        return _Support(examples, merged)
    expert = bench.teacher_of(task)
    return _Support(examples, merged, bench.features(expert, task, split), bench.head(expert, task))


def _evidence(
    protocol: ReadingProtocol, head: Head, support: _Support, rows: torch.Tensor | None, seed: int
) -> Evidence:
    """The evidence of one draw, with nothing in it that the protocol does not need."""
    merged, expert = support.merged, support.expert
    if rows is not None:
        merged, expert = merged.take(rows), None if expert is None else expert.take(rows)
    teacher = None
    if expert is not None and support.expert_head is not None and "teacher" in protocol.needs:
        teacher = logits_of(support.expert_head, expert.values)
    return evidence_for(protocol, head, support=merged, teacher=teacher, expert=expert, seed=seed)


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
