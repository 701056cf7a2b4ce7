"""DARE as PEFT reads it: drop at random, divide by the density, weigh, add.

peft 0.21, `peft.utils.merge_utils.dare_linear`; Yu et al., "Language models are super Mario", 2023, arXiv
2311.03099.

*Differs from the paper:* in words only: `density` is 1 - p, and `weights` (each 1 unless given) stand for
lambda.

*Differs from PEFT:* the draws depend on seed, tensor and expert alone, not on what was drawn before.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.dare import drop, weighted_sum
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import finite, fraction, per_expert

__all__ = ["DarePeft"]


@dataclass(frozen=True)
class DarePeft:
    """`density`: share of entries that stay; `weights`: one an expert; `seed` fixes what is dropped."""

    density: float = 0.5
    weights: tuple[float, ...] | None = None
    seed: int = 0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("weights", self.weights or 1.0)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        weights = per_expert(1.0 if self.weights is None else self.weights, len(deltas))
        rows = drop(deltas, site, keep=self.density, seed=self.seed)
        return weighted_sum(rows, [weight / self.density for weight in weights])
