"""DARE: drop entries of the task vectors at random, enlarge what is left, add.

Yu et al., "Language models are super Mario", 2023, arXiv 2311.03099: each entry of tau_t is dropped with
probability p and the others are divided by 1 - p, so that tau_t is kept in expectation; then task arithmetic.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import PerExpert, finite, fraction, per_expert
from orthomerge.merging.random import keep_mask

__all__ = ["Dare", "drop", "weighted_sum"]


@dataclass(frozen=True)
class Dare:
    """`drop`: p, the share of entries that go; `scale`: lambda, one or one an expert; `seed` of the draws."""

    drop: float = 0.5
    scale: PerExpert = 0.3
    seed: int = 0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("drop", self.drop, zero=True, one=False)
        finite("scale", self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        keep = 1 - self.drop
        numbers = per_expert(self.scale, len(deltas))
        return weighted_sum(drop(deltas, site, keep=keep, seed=self.seed), [n / keep for n in numbers])


def drop(deltas: torch.Tensor, site: Site, *, keep: float, seed: int) -> list[torch.Tensor]:
    """Each expert's entries with probability `keep`, else zero; not enlarged, not copied when all stay."""
    if keep >= 1:
        return list(deltas)
    return [
        # As bytes a mask turns into numbers seven times faster than as booleans.
        keep_mask(site, task, row.numel(), keep=keep, seed=seed)
        .view(torch.uint8)
        .to(row.dtype)
        .reshape(row.shape)
        .mul_(row)
        for task, row in zip(site.tasks, deltas, strict=True)
    ]


def weighted_sum(rows: Iterable[torch.Tensor], weights: Iterable[float]) -> torch.Tensor:
    """sum_t weights_t * rows_t, added in their order."""
    (first, weight), *rest = zip(rows, weights, strict=True)
    result = first * weight
    for row, number in rest:
        result.add_(row, alpha=number)
    return result
