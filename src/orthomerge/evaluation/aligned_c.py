"""The expert's head, fitted to merged features until it says what the expert said: no labels, no new parameters.

The aligner of the same name (`alignment/aligned_c.py`, which has the reference) as a protocol: it is handed the
expert's logits instead of the expert's features, and the seed of the evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orthomerge.alignment import aligned_c
from orthomerge.alignment.aligned_c import Recipe, Schedule
from orthomerge.alignment.distillation import divergence
from orthomerge.evaluation.evidence import support_of, teacher_of
from orthomerge.evaluation.protocol import Evidence, Need
from orthomerge.heads import Head

__all__ = ["AlignedC", "Recipe", "Schedule", "divergence"]


@dataclass(frozen=True)
class AlignedC:
    """`recipe` sets everything; `epochs`, `lr`, `batch` and `most` (steps) override it where they are given."""

    recipe: Recipe = "tuned"
    epochs: int | None = None
    lr: float | None = None
    batch: int | None = None
    most: int | None = None

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "teacher"})

    def __post_init__(self) -> None:
        self._aligner(seed=0)  # refuses options that make no sense

    @property
    def schedule(self) -> Schedule:
        """The recipe with what was overridden."""
        return self._aligner(seed=0).schedule

    def build(self, evidence: Evidence) -> Head:
        who = "aligned-c"
        teacher, support = teacher_of(evidence, who=who), support_of(evidence, who=who)
        return self._aligner(seed=evidence.seed).distil(support.values, teacher, evidence.head, task=support.task)

    def _aligner(self, *, seed: int) -> aligned_c.AlignedC:
        return aligned_c.AlignedC(self.recipe, self.epochs, self.lr, self.batch, self.most, seed)
