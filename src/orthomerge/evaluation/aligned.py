"""A merged encoder read through an aligner: any row of the table of aligners as a way of reading.

Aligners see features of the merged encoder and of the expert on the same unlabelled inputs; the head that they start
from is the expert's own, whatever the merged model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from orthomerge.alignment.aligner import Aligner
from orthomerge.alignment.aligners import make_aligner
from orthomerge.errors import RecipeError
from orthomerge.evaluation.evidence import support_of
from orthomerge.evaluation.protocol import Evidence, Need
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Classifier

__all__ = ["Aligned"]


@dataclass(frozen=True)
class Aligned:
    """The aligner; where it has a `seed`, the evidence's counts."""

    aligner: Aligner

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "expert"})

    @classmethod
    def by(cls, name: str, options: Mapping[str, Any]) -> Aligned:
        """The row of that name, with options."""
        return cls(make_aligner(name, options))

    def build(self, evidence: Evidence) -> Classifier:
        aligner: Any = self.aligner
        if any(field.name == "seed" for field in fields(aligner)):
            aligner = replace(aligner, seed=evidence.seed)
        found: Classifier = aligner.fit(_pair(evidence), evidence.head).classifier
        return found


def _pair(evidence: Evidence) -> FeaturePair:
    support = support_of(evidence, who="aligner")
    if evidence.expert is None:
        raise RecipeError(f"an aligner needs the expert's features of its inputs of {support.task!r}, got none")
    return FeaturePair(support, evidence.expert)
