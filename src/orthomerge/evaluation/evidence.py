"""What a protocol may look at: it declares what evidence it needs, and is given that and nothing else.

So what a score was allowed to see is part of its record, and labels cannot leak into a protocol without labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from orthomerge.core.errors import RecipeError
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
    """The support, which must be there; that its features are finite was checked when they were computed."""
    if evidence.support is None:
        raise RecipeError(f"{who!r} needs features of support inputs, got none; name a split to take them from")
    return evidence.support


def labels_of(evidence: Evidence, *, who: str) -> torch.Tensor:
    """The support's labels, which are rows of the head: a task checks its own."""
    support = support_of(evidence, who=who)
    if support.labels is None:
        raise RecipeError(
            f"{who!r} needs labels of its support inputs of {support.task!r}, got none; use a labelled split"
        )
    return support.labels
