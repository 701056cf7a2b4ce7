"""Linear methods: the weighted average, and the scaled sum of task vectors."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import total
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import PerExpert, finite, scaled_sum


@dataclass(frozen=True)
class Average:
    """Weighted average of the experts: theta = sum_t w_t theta_t.

    `weights`: one number per expert, normalised to sum to one; equal by default.

    Wortsman et al., "Model soups", 2022, arXiv 2203.05482. Because the weights sum to one, the result is the base plus
    the weighted mean of the task vectors, in which the base cancels.
    """

    weights: tuple[float, ...] | None = None

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        if self.weights is not None:
            finite("weights", self.weights)
            if sum(self.weights) <= 0:
                raise RecipeError(f"'weights' must sum to a positive number, got {list(self.weights)}")

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if self.weights is None:
            return total(list(deltas)).div_(len(deltas))
        whole = sum(self.weights)
        return scaled_sum(deltas, tuple(weight / whole for weight in self.weights))


@dataclass(frozen=True)
class TaskArithmetic:
    """Task arithmetic: theta = theta_b + sum_t lambda_t tau_t.

    `scale`: lambda, one for all experts or one per expert (0.3 suits eight tasks, 0.7 five).

    Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089.
    """

    scale: PerExpert = 0.3

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        finite("scale", self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return scaled_sum(deltas, self.scale)
