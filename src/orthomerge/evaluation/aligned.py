"""The expert's head, as it is or aligned: any entry of the table of aligners as a protocol.

"Current Eval" of FT-Classifier and of MOMA (Eq. 11) is the head as it is: logits g(x; theta_m) W_t^T + b_t, what every
merging paper reports. Aligners see features of the merged encoder and of the expert on the same unlabelled inputs; the
head that they start from is the expert's own, whatever the merged model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from orthomerge.alignment.aligned_c import AlignedC, Recipe
from orthomerge.alignment.aligner import Aligner
from orthomerge.alignment.aligners import make_aligner
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.evidence import Evidence, Need, support_of
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Classifier, Head


@dataclass(frozen=True)
class Current:
    """Has no options and looks at nothing."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    def build(self, evidence: Evidence) -> Head:
        return evidence.head


@dataclass(frozen=True)
class Aligned:
    """The aligner; if it has a `seed`, that of the evidence is used instead."""

    aligner: Aligner

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "expert"})

    @classmethod
    def by(cls, name: str, options: Mapping[str, Any]) -> Aligned:
        """The aligner of that name, with options."""
        return cls(make_aligner(name, options))

    def build(self, evidence: Evidence) -> Classifier:
        support = support_of(evidence, who="aligner")
        if evidence.expert is None:
            raise RecipeError(f"an aligner needs the expert's features of its inputs of {support.task!r}, got none")
        aligner: Any = self.aligner
        if any(field.name == "seed" for field in fields(aligner)):
            aligner = replace(aligner, seed=evidence.seed)
        classifier: Classifier = aligner.fit(FeaturePair(support, evidence.expert), evidence.head).classifier
        return classifier


def aligned_c(
    recipe: Recipe = "tuned",
    epochs: int | None = None,
    lr: float | None = None,
    batch: int | None = None,
    most: int | None = None,
) -> Aligned:
    """The protocol that is the aligner of the same name, with the seed of the draw.

    `recipe` sets everything; `epochs`, `lr`, `batch` and `most` (steps) override it where they are given.
    """
    return Aligned(AlignedC(recipe, epochs, lr, batch, most))
