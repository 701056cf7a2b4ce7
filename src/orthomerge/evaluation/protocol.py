"""How a merged encoder is read: the types that every protocol fills.

A protocol declares what evidence it needs, so that what a number was allowed to see is part of the record and not of a
footnote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from orthomerge.features.features import Features
    from orthomerge.heads import Classifier, Head

__all__ = ["Evidence", "Need", "ReadingProtocol"]

# features: inputs without labels; teacher: the expert's logits on them; expert: the expert's features of them; labels:
# their true labels.
Need = Literal["features", "teacher", "expert", "labels"]


@dataclass(frozen=True)
class Evidence:
    """What a protocol may look at. `support`: merged features of a few inputs; `teacher`: the expert's logits there;
    `expert`: the expert's features there.

    `support.labels` is None unless the protocol needs labels. `seed` fixes whatever is random.
    """

    head: Head
    support: Features | None = None
    teacher: torch.Tensor | None = None
    seed: int = 0
    expert: Features | None = None


class ReadingProtocol(Protocol):
    """Makes a classifier over merged features from evidence."""

    needs: ClassVar[frozenset[Need]]

    def build(self, evidence: Evidence) -> Classifier: ...
