"""What a protocol may look at: it declares what evidence it needs, and is given that and nothing else.

So what a score was allowed to see is part of its record, and labels cannot leak into a protocol without labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.models.features import FeaturePair, Features
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

    def labelled(self, protocol: str) -> tuple[Features, torch.Tensor]:
        """The support and its labels, which are rows of the head; `protocol`: for messages."""
        if self.support is None or self.support.labels is None:
            raise RecipeError(f"{protocol!r} needs labels of its support inputs, got none; use a labelled split")
        return self.support, self.support.labels

    def pair(self) -> FeaturePair:
        """The support as the model and as the expert see it."""
        if self.support is None or self.expert is None:
            raise RecipeError("an aligner needs features of its support inputs by the model and the expert, got none")
        return FeaturePair(self.support, self.expert)


class Builder(Protocol):
    """Builds the classifier that a model is scored with; its fields are its options."""

    needs: ClassVar[frozenset[Need]]

    def build(self, evidence: Evidence) -> Classifier: ...
