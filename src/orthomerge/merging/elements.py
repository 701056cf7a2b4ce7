"""Methods that decide entry by entry which deltas count: MagMax, consensus and breadcrumbs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import total, trim
from orthomerge.merging.kinds import Scope, Site, Surveyed, Vectors
from orthomerge.merging.options import PerExpert, finite, fraction, per_expert, scaled_sum
from orthomerge.merging.statistics import Thresholds, tensor_thresholds


@dataclass(frozen=True)
class MagMax:
    """MagMax: of all experts take, entry by entry, the delta of largest magnitude.

    `scale`: alpha, the share of the selected delta that is applied.

    Marczak et al., "MagMax: leveraging model merging for seamless continual learning", 2024, arXiv 2407.06322.
    Among equal magnitudes the later expert wins. The paper's own numbers come from experts that were fine-tuned
    one after the other.
    """

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


@dataclass(frozen=True)
class Consensus:
    """Consensus merging: keep of the summed task vectors only the entries that several tasks use.

    `threshold`: lambda_t, one or one per expert; `agree`: tasks that must use an entry; `scale`: alpha.

    Wang et al., "Localizing task information for improved model merging and compression", 2024, arXiv 2405.07813:
    task t uses an entry when |tau_t| > lambda_t |tau_m - tau_t|, tau_m = sum_t tau_t (its TALL mask); entries
    used by no task ("catastrophic") or by one ("selfish") are dropped: theta = theta_b + alpha * mask * tau_m.

    *Differs from the paper:* lambda_t and alpha are options, not searched on validation data. (FusionBench 0.2.33
    compares |theta_b - tau_t| on the left, which is a slip; this is the paper's formula.)
    """

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


@dataclass(frozen=True)
class Breadcrumbs:
    """Model breadcrumbs: in each tensor drop the largest entries as outliers and the smallest as noise, then add.

    `density`: share of each tensor that stays; `gamma`: share of outliers that goes; `scale`: lambda.

    Davari and Belilovsky, "Model breadcrumbs", 2023, arXiv 2312.06795.

    *Differs from the paper:* hyper-parameters as in mergekit 0.1.5: of n entries the int(gamma * n) largest go,
    then the smallest until int(density * n) are left. When both shares do not fit (density + gamma > 1) fewer
    outliers go. gamma = 0 drops no outliers: a plain trim by magnitude, here and in mergekit. density = 1 keeps
    everything, outliers included.

    *Differs from mergekit:* entries as large as the largest or as small as the smallest that is kept are all
    kept; mergekit keeps exactly int(density * n), and which of several equal ones depends on an unstable sort.
    """

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
