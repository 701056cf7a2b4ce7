"""TIES as FusionBench and the authors' code compute it, down to the last entry kept and the zero sums.

FusionBench 0.2.33, method `ties_merging` (options `threshold`, `scaling_factor`, `merge_func`), taken there
from AdaMerging and by that from Yadav et al., "TIES-merging", 2023, arXiv 2306.01708.

*Differs from the paper:* the threshold is the (count - int(density * count))-th smallest magnitude of the
whole vector, so one entry more survives; the default is the disjoint sum with lambda 0.3. Where the entries
cancel to exactly zero, the sign is the one elected by most coordinates of the model, which takes a second
look at everything; when that, too, is a draw, sum and mean take the negative entries and max gives zero.

*Differs from FusionBench:* `density` is a share, never a percentage, and 1 keeps everything instead of
crashing.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from orthomerge.errors import RecipeError, nearest
from orthomerge.merging.elect import disjoint_max, disjoint_mean, disjoint_sum, total, trim
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction
from orthomerge.merging.ties import model_thresholds

__all__ = ["TiesFusionBench"]

_MERGES = {"sum": disjoint_sum, "mean": disjoint_mean, "max": disjoint_max}


@dataclass(frozen=True)
class TiesFusionBench:
    """`density`: share of entries that survive; `scale`: lambda; `merge`: what those that agree become."""

    density: float = 0.2
    scale: float = 0.3
    merge: Literal["sum", "mean", "max"] = "sum"

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("scale", self.scale)
        if self.merge not in _MERGES:
            raise RecipeError(f"'merge' must be sum, mean or max, got {self.merge!r}; {nearest(self.merge, _MERGES)}")

    def survey(self, vectors: Vectors) -> TensorMethod:
        thresholds = model_thresholds(vectors, self.density, extra=1)
        majority = _majority(vectors, thresholds)
        if majority == 0 and self.merge != "max":
            majority = -1
        return _TiesFusionBench(thresholds, float(majority), self.merge, self.scale)


@dataclass(frozen=True)
class _TiesFusionBench:
    """FusionBench's TIES with the thresholds of the experts and the sign of draws."""

    thresholds: tuple[float, ...]
    draw: float
    kind: Literal["sum", "mean", "max"]
    scale: float

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = trim(deltas, self.thresholds)
        sign = total(rows).sign_()
        draws = torch.eq(sign, 0, out=torch.empty_like(sign))  # 1.0 where true
        return _MERGES[self.kind](rows, sign.add_(draws, alpha=self.draw)).mul_(self.scale)


def _majority(vectors: Vectors, thresholds: tuple[float, ...]) -> int:
    """The sign that is elected by more coordinates of the whole model: -1, 0 or 1."""
    if len(thresholds) == 1:  # nobody to cancel out
        return 1
    lead = 0
    for block in vectors.blocks():
        sums = total(trim(block.deltas, thresholds)).numpy()
        lead += int((sums > 0).sum()) - int((sums < 0).sum())
    return (lead > 0) - (lead < 0)
