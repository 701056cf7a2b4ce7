"""Evidence first, then a classifier, then predictions: one answer per draw of support inputs.

Support inputs come from another split than the scored one, or are the scored inputs themselves without their labels. A
protocol that needs labels is never scored on an input whose label it was shown. Encoding uses all threads; fits are
small and run with one, so that a result does not depend on their number.

The joint label space (KnOTS, Stoica et al. 2024, arXiv 2410.19735) asks whether the merged model is *one* model: the
task of an input is unknown. Every task's classifier reads the same inputs in its own way (pooling, maximum length);
their logits stand side by side as they are, [n, C_1 + ... + C_T], and a prediction counts only if it names the right
task and the right class.
Differs from the paper: the same label in two tasks ("seven" in MNIST and SVHN) is two classes here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.core.threads import fixed_threads
from orthomerge.data.task import Task, few_shot, share
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evidence import Evidence
from orthomerge.evaluation.metrics import UNSCORED, predict
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.models.heads import Classifier, Head, head_kind, head_of, logits_of
from orthomerge.models.model import Model


@dataclass(frozen=True)
class Draw:
    """Which inputs are support; `rows`: their places, None for all."""

    seed: int
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Answer:
    """The predicted class [n] of every test input for one seed; `extra`: numbers that inference needs beyond a head."""

    seed: int
    predicted: torch.Tensor
    extra: int


def answers(protocol: EvaluationProtocol, encoded: EncodedTasks, model: Model, task: str) -> Iterator[Answer]:
    """One answer per draw of support inputs; one in all if the protocol needs none."""
    builder, test = protocol.builder(), encoded.features(model, task, "test")
    kind = head_of(encoded.classifier(model, task)).kind
    for draw in draws(protocol, encoded.tasks[task]):
        shown = "labels" in protocol.needs and protocol.access == "transductive"
        if shown and (draw.rows is None or len(draw.rows) >= len(test)):
            raise RecipeError(
                "a protocol that needs labels cannot be scored on the inputs whose labels it was shown: of "
                f"{len(test)} inputs 0 would remain; take a part of them as support"
            )
        evidence = gather(protocol, encoded, model, task, draw)
        with fixed_threads(1):
            classifier = builder.build(evidence)
            predicted = predict(classifier, test.values, kind)
        if shown:
            predicted[draw.rows] = UNSCORED
        yield Answer(draw.seed, predicted, extra_numbers(classifier))


def draws(protocol: EvaluationProtocol, task: Task) -> Iterator[Draw]:
    """One per seed, one in all without support. Few shots are drawn per class, which uses labels, as in the papers."""
    if not protocol.needs:
        yield Draw(protocol.first)
        return
    shots, examples = protocol.shots, task[protocol.split]
    for seed in range(protocol.first, protocol.first + protocol.seeds):
        if shots is None:
            yield Draw(seed)
            continue
        if shots < 1:
            places = share(len(examples), shots, seed=seed)
        elif examples.labels is None:
            raise RecipeError(f"{shots} shots per class need labels to tell classes; give a share below 1, or all")
        else:
            places = few_shot(examples.labels, int(shots), seed=seed, allow_fewer=protocol.fewer)
        yield Draw(seed, torch.from_numpy(np.asarray(places, dtype=np.int64)))


def gather(protocol: EvaluationProtocol, encoded: EncodedTasks, model: Model, task: str, draw: Draw) -> Evidence:
    """The evidence of one draw, with nothing in it that the protocol does not declare in `needs`."""
    needs, classifier = protocol.needs, encoded.classifier(model, task)
    if not needs:
        return Evidence(cast("Head", classifier), seed=draw.seed)  # unchanged, it may be more than a head
    head, support, expert = head_of(classifier), encoded.features(model, task, protocol.split), None
    if "expert" in needs:
        teacher = encoded.teacher(task)
        head = head_of(encoded.classifier(teacher, task))
        expert = encoded.features(teacher, task, protocol.split).unlabelled()
    if "labels" not in needs:
        support = support.unlabelled()
    if draw.rows is not None:
        support, expert = support.take(draw.rows), None if expert is None else expert.take(draw.rows)
    return Evidence(head, support, expert, draw.seed)


def extra_numbers(classifier: Classifier) -> int:
    """How many numbers a classifier keeps that a head does not: the anchors of `knn`, the module of `surgery`."""
    if isinstance(classifier, Head):
        return 0
    tensors = getattr(classifier, "extra_tensors", None)
    kept = tensors() if tensors is not None else vars(classifier)
    return sum(value.numel() for value in kept.values() if isinstance(value, torch.Tensor))


def joint_predictions(encoded: EncodedTasks, models: Mapping[str, Model]) -> dict[str, torch.Tensor]:
    """Per task, the predicted place of every test input in the joint label space: tasks in the order of `models`."""
    classifiers = [encoded.classifier(model, task) for task, model in models.items()]
    kind = head_kind(head_of(classifiers[0]).kind)
    predicted = {}
    for task, model in models.items():
        logits = [
            logits_of(classifier, encoded.features(model, task, "test", reader=head_of(classifier)).values).float()
            for classifier in classifiers
        ]
        predicted[task] = kind.choices(torch.cat(logits, 1)).cpu()
    return predicted


def joint_labels(encoded: EncodedTasks, models: Mapping[str, Model]) -> dict[str, torch.Tensor]:
    """Per task, the true places of its test inputs in the joint label space."""
    starts = accumulate((len(encoded.tasks[task].labels) for task in models), initial=0)
    return {task: encoded.labels(task, "test") + start for task, start in zip(models, starts, strict=False)}
