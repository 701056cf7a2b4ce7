"""Methods that merge entry by entry: averages, sums, largest entries, masks."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.core.checks import at_least_one, finite, fraction
from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import PerExpert, per_expert, scaled_sum, total, trim
from orthomerge.merging.kinds import Scope, Site, Surveyed, TensorMethod, Vectors
from orthomerge.merging.statistics import thresholds


@dataclass(frozen=True)
class Average:
    """Weighted average of the experts: theta = sum_t w_t theta_t (Wortsman et al. 2022, arXiv 2203.05482).

    `weights`: one number per expert, normalised to sum to one; equal by default.
    """

    weights: tuple[float, ...] | None = None

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        if self.weights is not None:
            finite(weights=self.weights)
            if sum(self.weights) <= 0:
                raise RecipeError(f"'weights' must sum to a positive number, got {list(self.weights)}")

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if self.weights is None:
            return total(deltas).div_(len(deltas))
        norm = sum(self.weights)
        return scaled_sum(deltas, tuple(weight / norm for weight in self.weights))


@dataclass(frozen=True)
class TaskArithmetic:
    """Task arithmetic: theta = theta_b + sum_t lambda_t tau_t (Ilharco et al. 2023, arXiv 2212.04089).

    `scale`: lambda, one for all experts or one per expert (0.3 suits eight tasks, 0.7 five).
    """

    scale: PerExpert = 0.3

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        finite(scale=self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return scaled_sum(deltas, self.scale)


@dataclass(frozen=True)
class MagMax:
    """MagMax: for every entry, the delta of largest magnitude among the experts.

    Marczak et al., "MagMax: leveraging model merging for seamless continual learning", 2024, arXiv 2407.06322; there
    experts are fine-tuned one after the other. Among equal magnitudes the later expert wins.

    `scale`: alpha, the share of the selected delta that is applied.
    """

    scale: float = 0.5

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        finite(scale=self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        best = deltas[0].clone()
        for delta in deltas[1:]:
            wins = torch.ge(delta.abs(), best.abs(), out=torch.empty_like(best))  # 1.0 where true
            # Exact: the old entry is subtracted from itself or left, then the new one is added or not.
            best.addcmul_(best, wins, value=-1).addcmul_(delta, wins)
        return best.mul_(self.scale)


@dataclass(frozen=True)
class Consensus:
    """Consensus merging: sum the task vectors, and keep only the entries that several tasks use.

    Wang et al., "Localizing task information for improved model merging and compression", 2024, arXiv 2405.07813:
    task t uses an entry when |tau_t| > lambda_t |tau_m - tau_t|, tau_m = sum_t tau_t (its TALL mask); entries
    used by no task ("catastrophic") or by one ("selfish") are dropped: theta = theta_b + alpha * mask * tau_m.

    *Differs from the paper:* lambda_t and alpha are options, not searched on validation data. *Differs from
    FusionBench* 0.2.33, which compares |theta_b - tau_t| on the left.

    `threshold`: lambda_t, one or one per expert; `agree`: tasks that must use an entry; `scale`: alpha.
    """

    threshold: PerExpert = 0.4
    agree: int = 2
    scale: float = 0.3

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        finite(threshold=self.threshold, scale=self.scale)
        at_least_one(agree=self.agree)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if self.agree > len(deltas):
            raise RecipeError(
                f"'agree' is {self.agree}, but there are {len(deltas)} experts: nothing would be merged; "
                f"set it to at most {len(deltas)}"
            )
        tau_m = total(deltas)
        users = torch.zeros_like(tau_m)
        for delta, threshold in zip(deltas, per_expert(self.threshold, len(deltas)), strict=True):
            rest = (tau_m - delta).abs_().mul_(threshold)
            users += torch.gt(delta.abs(), rest, out=rest)  # 1.0 where true
        return tau_m.mul_(users >= self.agree).mul_(self.scale)


@dataclass(frozen=True)
class Breadcrumbs:
    """Model breadcrumbs: in each tensor drop the largest entries as outliers and the smallest as noise, then add.

    Davari and Belilovsky, "Model breadcrumbs", 2023, arXiv 2312.06795.
    *Differs from the paper:* hyper-parameters as in mergekit 0.1.5: of n entries the int(gamma * n) largest are
    dropped, then the smallest until int(density * n) are left; if density + gamma > 1, fewer outliers are dropped.
    *Differs from mergekit:* entries as large as the largest or as small as the smallest that is kept are all kept.

    `density`: share of each tensor that is kept; `gamma`: share dropped as outliers; `scale`: lambda.
    """

    density: float = 0.9
    gamma: float = 0.01
    scale: PerExpert = 0.3

    def __post_init__(self) -> None:
        fraction(density=self.density)
        fraction(gamma=self.gamma, zero=True, one=False)
        finite(scale=self.scale)

    def survey(self, vectors: Vectors) -> TensorMethod:
        scale = per_expert(self.scale, len(vectors.tasks))
        if self.density >= 1:
            return TaskArithmetic(scale)
        limits = {key: thresholds(vectors, self._ranks, keys=(key,)) for key in vectors.shapes}

        def merge(base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
            smallest, largest = limits[site.key]
            # hardshrink keeps only what exceeds the largest, so the difference drops exactly that.
            rows = [
                torch.sub(row, torch.hardshrink(delta, limit)) if limit < float("inf") else row
                for row, delta, limit in zip(trim(deltas, smallest), deltas, largest, strict=True)
            ]
            return scaled_sum(rows, scale)

        return Surveyed(merge)

    def _ranks(self, count: int) -> tuple[int, int]:
        """Ranks of the smallest and of the largest entry to keep."""
        kept = int(self.density * count)
        outliers = min(int(self.gamma * count), count - kept)
        return (outliers + kept, outliers + 1) if kept else (0, 0)
