"""Consensus merging: keep of the summed task vectors only the entries that several tasks use.

Wang et al., "Localizing task information for improved model merging and compression", 2024, arXiv 2405.07813:
task t uses an entry when |tau_t| > lambda_t |tau_m - tau_t|, tau_m = sum_t tau_t (its TALL mask); entries
used by no task ("catastrophic") or by one ("selfish") are dropped: theta = theta_b + alpha * mask * tau_m.

*Differs from the paper:* lambda_t and alpha are options, not searched on validation data. (FusionBench 0.2.33
compares |theta_b - tau_t| on the left, which is a slip; this is the paper's formula.)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import total
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import PerExpert, finite, per_expert


@dataclass(frozen=True)
class Consensus:
    """`threshold`: lambda_t, one or one per expert; `agree`: tasks that must use an entry; `scale`: alpha."""

    threshold: PerExpert = 0.4
    agree: int = 2
    scale: float = 0.3

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        finite("threshold", self.threshold)
        finite("scale", self.scale)
        if self.agree < 1:
            raise RecipeError(f"'agree' must be at least 1, got {self.agree}")

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if self.agree > len(deltas):
            raise RecipeError(
                f"'agree' is {self.agree}, but there are {len(deltas)} experts: nothing would be merged; "
                f"set it to at most {len(deltas)}"
            )
        tau_m = total(list(deltas))
        users, uses, rest = torch.zeros_like(tau_m), torch.empty_like(tau_m), torch.empty_like(tau_m)
        for delta, threshold in zip(deltas, per_expert(self.threshold, len(deltas)), strict=True):
            torch.sub(tau_m, delta, out=rest).abs_().mul_(threshold)
            users.add_(torch.gt(delta.abs(), rest, out=uses))  # 1.0 where true
        return tau_m.mul_(torch.ge(users, self.agree, out=uses)).mul_(self.scale)
