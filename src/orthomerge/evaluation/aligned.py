"""A merged encoder read through an aligner: any row of the table of aligners as a way of reading.

Aligners see features of the merged encoder and of the expert on the same unlabelled inputs; the head that they start
from is the expert's own, whatever the merged model has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, cast

from orthomerge.alignment.aligner import Aligner, StackAligner
from orthomerge.alignment.aligners import make_aligner
from orthomerge.errors import RecipeError
from orthomerge.evaluation.evidence import support_of
from orthomerge.evaluation.protocol import Evidence, Need
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Classifier

__all__ = ["Aligned"]

_FITS, _NUMBERS = 20, 1 << 27  # of fits side by side: their number, and that of their features


@dataclass(frozen=True)
class Aligned:
    """The aligner; where it has a `seed`, the evidence's counts."""

    aligner: Aligner

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "expert"})

    @classmethod
    def by(cls, name: str, options: Mapping[str, Any]) -> Aligned:
        """The row of that name, with options."""
        return cls(make_aligner(name, options))

    @property
    def together(self) -> bool:
        """Whether several fits cost less side by side."""
        return hasattr(self.aligner, "fit_each")

    def build(self, evidence: Evidence) -> Classifier:
        aligner: Any = self.aligner
        if any(field.name == "seed" for field in fields(aligner)):
            aligner = replace(aligner, seed=evidence.seed)
        found: Classifier = aligner.fit(_pair(evidence), evidence.head).classifier
        return found

    def build_each(self, evidence: Sequence[Evidence]) -> list[Classifier]:
        """What `build` makes of each, up to rounding; all have the same head. Those of as many inputs go together."""
        found: dict[int, Classifier] = {}
        by_count: dict[int, list[int]] = {}
        for place, each in enumerate(evidence):
            by_count.setdefault(0 if each.support is None else len(each.support), []).append(place)
        for count, places in by_count.items():
            most = min(_FITS, max(_NUMBERS // max(count * evidence[0].head.width, 1), 1))
            for few in (places[start : start + most] for start in range(0, len(places), most)):
                pairs, seeds = [_pair(evidence[place]) for place in few], [evidence[place].seed for place in few]
                fits = cast("StackAligner", self.aligner).fit_each(pairs, evidence[0].head, seeds)
                found |= {place: fit.classifier for place, fit in zip(few, fits, strict=True)}
        return [found[place] for place in range(len(evidence))]


def _pair(evidence: Evidence) -> FeaturePair:
    support = support_of(evidence, who="aligner")
    if evidence.expert is None:
        raise RecipeError(f"an aligner needs the expert's features of its inputs of {support.task!r}, got none")
    return FeaturePair(support, evidence.expert)
