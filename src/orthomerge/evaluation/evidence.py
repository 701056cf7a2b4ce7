"""What a protocol may look at before a model is scored, and the checks that all protocols share.

A protocol declares what evidence it needs, so that what a score was allowed to see is part of its record. `gather`
gives it that and nothing else: labels cannot leak into a protocol without labels by accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError

if TYPE_CHECKING:
    import torch

    from orthomerge.models.features import Features
    from orthomerge.models.heads import Classifier, Head


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
