"""DARE as mergekit reads it: drop at random, restore each tensor's L1 norm, weigh, add.

mergekit 0.1.5, merge method `dare_linear` (options `density`, `weight`, `normalize`, `rescale`, `lambda`); Yu
et al., "Language models are super Mario", 2023, arXiv 2311.03099.

*Differs from the paper:* what is left of a tensor is multiplied by (L1 norm before) / (L1 norm after), not
divided by the density; with large tensors the two agree closely, with small ones they do not, and the
expectation is no longer exactly tau. `normalize` divides by the sum of the weights.

*Differs from mergekit:* the draws depend on seed, tensor and expert alone, not on the order of the merge; the
norms are summed in float64, so that half precision cannot overflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.dare import drop, weighted_sum
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction, per_expert
from orthomerge.merging.random import keep_mask
from orthomerge.merging.runs import runs

__all__ = ["DareMergekit", "l1_factors"]

_TINY = 1e-7  # norms under this are not restored, as in mergekit
_NOTHING = 1e-8  # weights whose sum is under this are not divided by, as in mergekit


@dataclass(frozen=True)
class DareMergekit:
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
        share = sum(weights)
        if self.normalize and abs(share) >= _NOTHING:
            weights = tuple(weight / share for weight in weights)
        factors = l1_factors(vectors, keep=self.density, rescale=self.rescale, seed=self.seed)
        return _DareMergekit(factors, weights, self.density, self.scale, self.seed)


@dataclass(frozen=True)
class _DareMergekit:
    """mergekit's DARE with the factor that restores each expert's norm, by tensor."""

    factors: Mapping[str, tuple[float, ...]]
    weights: tuple[float, ...]
    density: float
    scale: float
    seed: int

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = drop(deltas, site, keep=self.density, seed=self.seed)
        factors = zip(self.weights, self.factors[site.key], strict=True)
        return weighted_sum(rows, [self.scale * weight * factor for weight, factor in factors])


def l1_factors(vectors: Vectors, *, keep: float, rescale: bool, seed: int) -> dict[str, tuple[float, ...]]:
    """What gives each expert's dropped tensor its L1 norm again, by tensor; reads nothing when all stay."""
    ones = (1.0,) * len(vectors.tasks)
    if keep >= 1 or not rescale:
        return dict.fromkeys(vectors.shapes, ones)
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    for site, rows in runs(vectors):
        magnitudes = rows[1:].abs()
        masks = torch.stack([keep_mask(site, task, rows.shape[1], keep=keep, seed=seed) for task in vectors.tasks])
        zeros = torch.zeros(len(vectors.tasks), dtype=rows.dtype)
        before[site.key] = before.get(site.key, zeros) + magnitudes.sum(1)
        after[site.key] = after.get(site.key, zeros) + magnitudes.mul_(masks.view(torch.uint8)).sum(1)
    return {key: tuple(map(_factor, before[key].tolist(), after[key].tolist())) for key in before}


def _factor(before: float, after: float) -> float:
    return 1.0 if min(before, after) < _TINY else before / after
