"""MagMax: of all experts take, entry by entry, the delta of largest magnitude.

Marczak et al., "MagMax: leveraging model merging for seamless continual learning", 2024, arXiv 2407.06322.
Among equal magnitudes the later expert wins. The paper's own numbers come from experts that were fine-tuned
one after the other.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import finite


@dataclass(frozen=True)
class MagMax:
    """`scale`: alpha, the share of the selected delta that is applied."""

    scale: float = 0.5

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        finite("scale", self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        best = deltas[0].clone()
        most = best.abs()
        wins = torch.empty_like(best)  # 1.0 where the next expert's entry is at least as large
        for delta in deltas[1:]:
            size = delta.abs()
            torch.ge(size, most, out=wins)
            # Exact: the old entry is subtracted from itself or left, then the new one is added or not.
            best.addcmul_(best, wins, value=-1).addcmul_(delta, wins)
            torch.maximum(most, size, out=most)
        return best.mul_(self.scale)
