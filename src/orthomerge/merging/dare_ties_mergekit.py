"""DARE with a sign election as mergekit reads it: drop at random, restore the L1 norm, weigh, elect, add.

mergekit 0.1.5, merge method `dare_ties` (options `density`, `weight`, `normalize`, `rescale`, `lambda`); Yu
et al., "Language models are super Mario", 2023, arXiv 2311.03099, and Yadav et al., "TIES-merging", 2023,
arXiv 2306.01708.

*Differs from the paper:* nothing is trimmed by magnitude, only dropped at random; each tensor's L1 norm is
restored (see `DareMergekit`); the weights multiply before the sign is elected (see `TiesMergekit`). Those
that agree are added; `normalize`, off there and here unless asked for, divides by the sum of their weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.dare import drop
from orthomerge.merging.dare_mergekit import l1_factors
from orthomerge.merging.elect import disjoint_mean, disjoint_sum, elect_sign
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction, per_expert

__all__ = ["DareTiesMergekit"]


@dataclass(frozen=True)
class DareTiesMergekit:
    """`density`: share of entries that stay; `weights`: one an expert, 1 unless given; `scale`: lambda."""

    density: float = 1.0
    weights: tuple[float, ...] | None = None
    normalize: bool = False
    rescale: bool = True
    seed: int = 0
    scale: float = 1.0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("weights", self.weights or 1.0)
        finite("scale", self.scale)

    def survey(self, vectors: Vectors) -> TensorMethod:
        weights = per_expert(1.0 if self.weights is None else self.weights, len(vectors.tasks))
        factors = l1_factors(vectors, keep=self.density, rescale=self.rescale, seed=self.seed)
        return _DareTiesMergekit(factors, weights, self)


@dataclass(frozen=True)
class _DareTiesMergekit:
    """mergekit's DARE-TIES with the factor that restores each expert's norm, by tensor."""

    factors: Mapping[str, tuple[float, ...]]
    weights: tuple[float, ...]
    options: DareTiesMergekit

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        dropped = drop(deltas, site, keep=self.options.density, seed=self.options.seed)
        factors = zip(self.weights, self.factors[site.key], strict=True)
        rows = [row * (weight * factor) for row, (weight, factor) in zip(dropped, factors, strict=True)]
        sign = elect_sign(rows)
        if self.options.normalize:
            return disjoint_mean(rows, sign, votes=self.weights).mul_(self.options.scale)
        return disjoint_sum(rows, sign).mul_(self.options.scale)
