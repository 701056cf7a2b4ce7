"""Weighted average of the experts: theta = sum_t w_t theta_t.

Wortsman et al., "Model soups", 2022, arXiv 2203.05482. With weights that sum to one this is the base plus the weighted
mean of the task vectors, so the base itself drops out.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import total
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import finite, scaled_sum


@dataclass(frozen=True)
class Average:
    """`weights`: one number per expert, normalised to sum to one; equal when not given."""

    weights: tuple[float, ...] | None = None

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        finite("weights", self.weights)
        if sum(self.weights) <= 0:
            raise RecipeError(f"'weights' must sum to a positive number, got {list(self.weights)}")

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if self.weights is None:
            return total(list(deltas)).div_(len(deltas))
        whole = sum(self.weights)
        return scaled_sum(deltas, tuple(weight / whole for weight in self.weights))
