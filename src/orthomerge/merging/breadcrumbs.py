"""Model breadcrumbs: in each tensor drop the largest entries as outliers and the smallest as noise, then add.

Davari and Belilovsky, "Model breadcrumbs", 2023, arXiv 2312.06795.

*Differs from the paper:* hyper-parameters as in mergekit 0.1.5: of n entries the int(gamma * n) largest go,
then the smallest until int(density * n) are left. When both shares do not fit (density + gamma > 1) fewer
outliers go. gamma = 0 drops no outliers: a plain trim by magnitude, here and in mergekit. density = 1 keeps
everything, outliers included.

*Differs from mergekit:* entries as large as the largest or as small as the smallest that is kept are all
kept; mergekit keeps exactly int(density * n), and which of several equal ones depends on an unstable sort.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from orthomerge.merging.elect import trim
from orthomerge.merging.kinds import Scope, Site, Surveyed, Vectors
from orthomerge.merging.options import PerExpert, finite, fraction, per_expert, scaled_sum
from orthomerge.merging.statistics import Thresholds, tensor_thresholds


@dataclass(frozen=True)
class Breadcrumbs:
    """`density`: share of each tensor that stays; `gamma`: share of outliers that goes; `scale`: lambda."""

    density: float = 0.9
    gamma: float = 0.01
    scale: PerExpert = 0.3

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        fraction("gamma", self.gamma, zero=True, one=False)
        finite("scale", self.scale)

    def survey(self, vectors: Vectors) -> Surveyed:
        scale = per_expert(self.scale, len(vectors.tasks))
        everything: tuple[Thresholds, ...] = ((0.0,) * len(scale), (float("inf"),) * len(scale))
        limits = dict.fromkeys(vectors.shapes, everything)
        if self.density < 1:
            limits = tensor_thresholds(vectors, self._ranks)
        return Surveyed(self.scope, partial(self._merge, limits=limits))

    def _ranks(self, count: int) -> tuple[int, int]:
        """Ranks of the smallest and of the largest entry to keep."""
        kept = int(self.density * count)
        outliers = min(int(self.gamma * count), count - kept)
        return (outliers + kept, outliers + 1) if kept else (0, 0)

    def _merge(
        self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site, limits: Mapping[str, tuple[Thresholds, ...]]
    ) -> torch.Tensor:
        """Keep magnitudes from the smallest to the largest limit of each expert."""
        smallest, largest = limits[site.key]
        # hardshrink leaves what is over the largest; subtracted from itself that is zero, the rest stays.
        rows = [
            torch.sub(row, torch.hardshrink(delta, limit)) if limit < float("inf") else row
            for row, delta, limit in zip(trim(deltas, smallest), deltas, largest, strict=True)
        ]
        return scaled_sum(rows, self.scale)
