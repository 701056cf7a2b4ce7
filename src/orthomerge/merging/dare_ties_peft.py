"""DARE with a sign election as PEFT reads it: drop at random, rescale, elect, weigh, divide by the count.

peft 0.21, `peft.utils.merge_utils.dare_ties` with `majority_sign_method="total"`; Yu et al., "Language models
are super Mario", 2023, arXiv 2311.03099, and Yadav et al., "TIES-merging", 2023, arXiv 2306.01708.

*Differs from the paper:* nothing is trimmed by magnitude; election, weights and count as in `TiesPeft`.

*Differs from PEFT:* the draws depend on seed, tensor and expert alone, not on what was drawn before.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.dare import drop
from orthomerge.merging.elect import disjoint_mean, elect_sign
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import finite, fraction, per_expert

__all__ = ["DareTiesPeft"]


@dataclass(frozen=True)
class DareTiesPeft:
    """`density`: share of entries that stay; `weights`: one an expert, each 1 unless given."""

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
        factors = [weight / self.density for weight in weights]
        return disjoint_mean(rows, elect_sign(rows), factors=factors)
