"""TIES with a disjoint sum: the convention of AdaMerging, Surgery and MOMA, with a smaller lambda.

Yang et al., "AdaMerging", 2023, arXiv 2310.02575; the trim and the election are those of TIES (Yadav et al.
2023, arXiv 2306.01708).

*Differs from the paper:* TIES averages the entries that agree, this adds them: the result is up to T times
longer, so that lambda is 0.3 and not about 1. Ties and zero sums as in `Ties`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.elect import disjoint_sum, elect_sign, trim
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction
from orthomerge.merging.ties import model_thresholds

__all__ = ["TiesSum"]


@dataclass(frozen=True)
class TiesSum:
    """`density`: share of entries that survive the trim; `scale`: lambda (0.3 suits eight tasks)."""

    density: float = 0.2
    scale: float = 0.3

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("scale", self.scale)

    def survey(self, vectors: Vectors) -> TensorMethod:
        return _TiesSum(model_thresholds(vectors, self.density), self.scale)


@dataclass(frozen=True)
class _TiesSum:
    """The disjoint sum with the magnitude from which on each expert's entries are kept."""

    thresholds: tuple[float, ...]
    scale: float

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = trim(deltas, self.thresholds)
        return disjoint_sum(rows, elect_sign(rows)).mul_(self.scale)
