"""Predictions of a protocol for the test inputs of a task: one answer per draw of support inputs.

A protocol that needs labels is never scored on an input whose label it was given. Fits are small and run with one
thread, so that a result does not depend on the number of threads.

In the joint label space (KnOTS, Stoica et al. 2024, arXiv 2410.19735) the task of an input is unknown: the logits of
all tasks' classifiers are concatenated, [n, C_1 + ... + C_T], and a prediction counts only if task and class are
right. Differs from the paper: the same label in two tasks ("seven" in MNIST and SVHN) counts as two classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Task, few_shot, share
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import UNSCORED, predict
from orthomerge.evaluation.protocols import EvaluationProtocol, Evidence
from orthomerge.models.heads import Classifier, Head, head_kind, head_of, logits_of
from orthomerge.models.model import Model

_Rows = torch.Tensor | None  # of the support inputs; None for all


@dataclass(frozen=True)
class Answer:
    """Predicted and true classes [n] of the test inputs for one seed; `extra`: number of extra parameters."""

    seed: int
    predicted: torch.Tensor
    truth: torch.Tensor
    extra: int


def answers(protocol: EvaluationProtocol, encoded: EncodedTasks, model: Model, task: str) -> Iterator[Answer]:
    """Yield one answer per draw of support inputs, or a single one if the protocol needs none."""
    builder, test = protocol.builder(), encoded.features(model, task, "test")
    kind = head_of(encoded.classifier(model, task)).kind
    uses_test_labels = "labels" in protocol.needs and protocol.access == "transductive"
    for seed, rows in draws(protocol, encoded.tasks[task]):
        if uses_test_labels and (rows is None or len(rows) >= len(test)):
            raise RecipeError(
                "a protocol that needs labels cannot be scored on the inputs whose labels it was given: of "
                f"{len(test)} inputs 0 would remain; use fewer shots"
            )
        evidence = gather(protocol, encoded, model, task, seed, rows)
        with fixed_threads(1):
            classifier = builder.build(evidence)
            predicted = predict(classifier, test.values, kind)
        if uses_test_labels:
            predicted[rows] = UNSCORED
        yield Answer(seed, predicted, encoded.labels(task, "test"), extra_numbers(classifier))


def draws(protocol: EvaluationProtocol, task: Task) -> Iterator[tuple[int, _Rows]]:
    """Yield seed and support rows (None: all) per draw; one draw without support. Shots are per class."""
    if not protocol.needs:
        yield protocol.first, None
        return
    shots, examples = protocol.shots, task[protocol.split]
    for seed in range(protocol.first, protocol.first + protocol.seeds):
        if shots is None:
            yield seed, None
            continue
        if shots < 1:
            rows = share(len(examples), shots, seed=seed)
        elif examples.labels is None:
            raise RecipeError(f"{shots} shots per class need labelled inputs; give labels, a share below 1, or all")
        else:
            rows = few_shot(examples.labels, int(shots), seed=seed, allow_fewer=protocol.fewer)
        yield seed, torch.from_numpy(np.asarray(rows, dtype=np.int64))


def gather(
    protocol: EvaluationProtocol, encoded: EncodedTasks, model: Model, task: str, seed: int = 0, rows: _Rows = None
) -> Evidence:
    """Gather the evidence of one draw: only what the protocol declares in `needs`."""
    needs, classifier = protocol.needs, encoded.classifier(model, task)
    if not needs:
        return Evidence(cast("Head", classifier), seed=seed)  # unchanged: it may have extra parameters
    head, support, expert = head_of(classifier), encoded.features(model, task, protocol.split), None
    if "expert" in needs:
        teacher = encoded.teacher(task)
        head = head_of(encoded.classifier(teacher, task))
        expert = encoded.features(teacher, task, protocol.split).unlabelled()
    if "labels" not in needs:
        support = support.unlabelled()
    if rows is not None:
        support, expert = support.take(rows), None if expert is None else expert.take(rows)
    return Evidence(head, support, expert, seed)


def extra_numbers(classifier: Classifier) -> int:
    """Count the extra parameters of a classifier: the anchors of `knn`, the module of `surgery`."""
    if isinstance(classifier, Head):
        return 0
    values = classifier.extra_tensors() if hasattr(classifier, "extra_tensors") else vars(classifier)
    return sum(value.numel() for value in values.values() if isinstance(value, torch.Tensor))


def joint_answers(encoded: EncodedTasks, models: Mapping[str, Model]) -> Iterator[tuple[str, Answer]]:
    """Yield one answer per task, in the joint label space of `models`."""
    classifiers = {task: encoded.classifier(model, task) for task, model in models.items()}
    extra, start = sum(map(extra_numbers, classifiers.values())), 0
    for task, model in models.items():
        head = head_of(classifiers[task])
        logits = [
            logits_of(classifier, encoded.features(model, task, "test", reader=head_of(classifier)).values).float()
            for classifier in classifiers.values()
        ]
        predicted = head_kind(head.kind).choices(torch.cat(logits, 1)).cpu()
        yield task, Answer(0, predicted, encoded.labels(task, "test") + start, extra)
        start += len(head.labels)
