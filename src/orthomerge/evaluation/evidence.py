"""Evidence first, then a classifier, then predictions: one answer per draw of support inputs.

A protocol declares what evidence it needs, so that what a score was allowed to see is part of its record. `gather`
gives it that and nothing else: labels cannot leak into a protocol without labels by accident.

Support inputs come from another split than the scored one, or are the scored inputs themselves without their labels. A
protocol that needs labels is never scored on an input whose label it was shown. Encoding uses all threads; fits are
small and run with one, so that a result does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, cast

import numpy as np
import torch

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.data.sampling import few_shot, share
from orthomerge.evaluation.metrics import UNSCORED, predict
from orthomerge.merging.stream import single_threaded
from orthomerge.models.heads import Head, head_of

if TYPE_CHECKING:
    from orthomerge.data.task import Split, Task
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.evaluation.protocol import EvaluationProtocol
    from orthomerge.models.features import Features
    from orthomerge.models.heads import Classifier
    from orthomerge.models.model import Model


# features: inputs without labels; expert: the expert's features of them and its head; labels: their true labels.
Need = Literal["features", "expert", "labels"]


@dataclass(frozen=True)
class Evidence:
    """`support`: the model's features of some inputs; `expert`: the expert's features of them.

    `head` is the model's, or the expert's own if the protocol needs the expert. `support.labels` is None unless the
    protocol needs labels. `seed` fixes whatever is random.
    """

    head: Head
    support: Features | None = None
    expert: Features | None = None
    seed: int = 0


class Builder(Protocol):
    """Builds the classifier that a model is scored with; its fields are its options."""

    needs: ClassVar[frozenset[Need]]

    def build(self, evidence: Evidence) -> Classifier: ...


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
        shown = "labels" in builder.needs and protocol.access == "transductive"
        if shown and (draw.rows is None or len(draw.rows) >= len(test)):
            raise RecipeError(
                "a protocol that needs labels cannot be scored on the inputs whose labels it was shown: of "
                f"{len(test)} inputs 0 would remain; take a part of them as support"
            )
        evidence = gather(builder.needs, encoded, model, task, protocol.split, draw)
        with single_threaded():
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


def gather(
    needs: AbstractSet[Need], encoded: EncodedTasks, model: Model, task: str, split: Split, draw: Draw
) -> Evidence:
    """The evidence of one draw, with nothing in it that was not declared in `needs`."""
    classifier = encoded.classifier(model, task)
    if not needs:
        return Evidence(cast("Head", classifier), seed=draw.seed)  # unchanged, it may be more than a head
    head, support, expert = head_of(classifier), encoded.features(model, task, split), None
    if "expert" in needs:
        teacher = encoded.teacher(task)
        head, expert = head_of(encoded.classifier(teacher, task)), encoded.features(teacher, task, split).unlabelled()
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


def support_of(evidence: Evidence, *, who: str) -> Features:
    """The support, which must be there, finite, and as wide as the head."""
    support, width = evidence.support, evidence.head.width
    if support is None:
        raise RecipeError(f"{who!r} needs features of support inputs, got none; name a split to take them from")
    if not len(support):
        raise RecipeError(f"{who!r} needs at least one support input of {support.task!r}, got 0")
    if support.values.shape[1] != width:
        raise IncompatibleError(
            f"the head of {support.task!r} reads {width} features but the support has {support.values.shape[1]}"
        )
    if not support.values.isfinite().all():
        rows = int((~support.values.isfinite()).any(1).sum())
        raise NumericalError(f"{rows} of {len(support)} support features of {support.task!r} are NaN or infinite")
    return support


def labels_of(evidence: Evidence, *, who: str) -> torch.Tensor:
    """The support's labels, all of which are rows of the head."""
    support = support_of(evidence, who=who)
    if support.labels is None:
        raise RecipeError(
            f"{who!r} needs labels of its support inputs of {support.task!r}, got none; use a labelled split"
        )
    low, high, classes = int(support.labels.min()), int(support.labels.max()), len(evidence.head.labels)
    if low < 0 or high >= classes:
        raise IncompatibleError(f"labels of {support.task!r} must be in 0..{classes - 1}, got {low}..{high}")
    return support.labels
