"""Task arithmetic: theta = theta_b + sum_t lambda_t tau_t.

Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import finite, scaled_sum


@dataclass(frozen=True)
class TaskArithmetic:
    """`scale`: lambda, one for all experts or one per expert (0.3 suits eight tasks, 0.7 five)."""

    scale: float | tuple[float, ...] = 0.3

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        finite("scale", self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return scaled_sum(deltas, self.scale)
