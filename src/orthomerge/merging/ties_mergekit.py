"""TIES as mergekit reads it: trim each tensor, weigh, elect, divide by the weights of those that agree.

mergekit 0.1.5, merge method `ties` (options `density`, `weight`, `normalize`, `lambda`); Yadav et al.,
"TIES-merging", 2023, arXiv 2306.01708.

*Differs from the paper:* the trim is per tensor and keeps at least one entry; the weights multiply the deltas
before the sign is elected, so a heavy expert decides it; the sum of those that agree is divided by the sum of
their weights (by nothing when not normalised, or when those weights sum to zero). A sum of exactly zero
elects plus.

*Differs from mergekit:* it keeps exactly k entries, and which of several equal ones depends on an unstable
sort; here all entries as large as the k-th are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.elect import disjoint_mean, disjoint_sum, elect_sign, trim
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction, per_expert
from orthomerge.merging.tensor_quantiles import Thresholds
from orthomerge.merging.ties_per_tensor import tensor_thresholds

__all__ = ["TiesMergekit", "weighted_consensus"]


@dataclass(frozen=True)
class TiesMergekit:
    """`density`: share of each tensor that survives; `weights`: one an expert, or 1; `scale`: lambda."""

    density: float = 1.0
    weights: tuple[float, ...] | None = None
    normalize: bool = True
    scale: float = 1.0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("weights", self.weights or 1.0)
        finite("scale", self.scale)

    def survey(self, vectors: Vectors) -> TensorMethod:
        weights = per_expert(1.0 if self.weights is None else self.weights, len(vectors.tasks))
        thresholds = tensor_thresholds(vectors, self.density, least=1)
        return _TiesMergekit(thresholds, weights, normalize=self.normalize, scale=self.scale)


@dataclass(frozen=True)
class _TiesMergekit:
    """mergekit's TIES with the magnitude from which on each expert's entries are kept, by tensor."""

    thresholds: Mapping[str, Thresholds]
    weights: tuple[float, ...]
    normalize: bool
    scale: float

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = trim(deltas, self.thresholds[site.key])
        return weighted_consensus(rows, self.weights, normalize=self.normalize).mul_(self.scale)


def weighted_consensus(rows: Sequence[torch.Tensor], weights: Sequence[float], *, normalize: bool) -> torch.Tensor:
    """Weigh, elect by the weighted sum, add those that agree, and divide by their weights if `normalize`."""
    weighted = [row if weight == 1 else row * weight for row, weight in zip(rows, weights, strict=True)]
    sign = elect_sign(weighted)
    return disjoint_mean(weighted, sign, votes=weights) if normalize else disjoint_sum(weighted, sign)
