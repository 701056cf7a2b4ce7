"""TIES: trim each task vector, elect a sign for each entry, merge the entries that agree with it.

Yadav et al., "TIES-merging: resolving interference when merging models", 2023, arXiv 2306.01708: theta = theta_b +
lambda * mean over {t : sign(tau_t) = elected} of trimmed tau_t, where each tau_t keeps the `density` share of entries
that is largest in magnitude among all its tensors. Each function below `Ties` is a row of the table of methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from orthomerge.core.checks import choices, finite, fraction
from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import PerExpert, disjoint, disjoint_mean, elect_sign, per_expert, total, trim
from orthomerge.merging.kinds import Site, Surveyed, Vectors
from orthomerge.merging.statistics import Thresholds, thresholds

Merge = Literal["sum", "mean", "max"]
_Voters = Callable[[torch.Tensor, str], list[torch.Tensor]]


@dataclass(frozen=True)
class Ties:
    """TIES with an option for every point in which implementations differ; the defaults are the paper's.

    `merge`: what the entries that agree become (a mean divides by their weights); `trim`: whether `density` is a share
    of the whole model or of each tensor; `rounding`: of the number of entries kept, int(density * count); `weigh`:
    whether the weights multiply before the election, or after it, where the mean divides by the number of entries that
    agree; `zero`: the sign where entries sum to zero, plus or the one that most coordinates of the model elect. All
    entries as large as the smallest one kept are kept.
    """

    density: float = 0.2
    scale: float = 1.0
    weights: PerExpert | None = None
    merge: Merge = "mean"
    trim: Literal["model", "tensor"] = "model"
    rounding: Literal["down", "at least one", "one more"] = "down"
    weigh: Literal["before", "after"] = "before"
    zero: Literal["plus", "majority"] = "plus"

    def __post_init__(self) -> None:
        fraction(density=self.density)
        finite(scale=self.scale, weights=self.weights or 1.0)
        choices(self)
        if self.weigh == "after" and self.merge != "mean":
            raise RecipeError(f"'merge' must be 'mean' where 'weigh' is 'after', got {self.merge!r}")

    def survey(self, vectors: Vectors) -> Surveyed:
        weights = per_expert(1.0 if self.weights is None else self.weights, len(vectors.tasks))
        voters = partial(self._voters, weights=weights, limits=self._limits(vectors))
        zero = self._majority(voters, vectors) if self.zero == "majority" else None

        def merge(base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
            rows = voters(deltas, site.key)
            sign = _elected(rows, zero)
            if self.merge != "mean":
                merged = disjoint(rows, sign, join=torch.add if self.merge == "sum" else torch.maximum)
            elif self.weigh == "after":
                merged = disjoint_mean(rows, sign, factors=weights)
            else:
                merged = disjoint_mean(rows, sign, votes=weights)
            return merged.mul_(self.scale)

        return Surveyed(merge)

    def _limits(self, vectors: Vectors) -> Mapping[str, Thresholds]:
        if self.density >= 1:
            return dict.fromkeys(vectors.shapes, (0.0,) * len(vectors.tasks))
        if self.trim == "tensor":
            return {key: thresholds(vectors, self._ranks, keys=(key,))[0] for key in vectors.shapes}
        return dict.fromkeys(vectors.shapes, thresholds(vectors, self._ranks)[0])

    def _ranks(self, count: int) -> tuple[int]:
        kept = int(self.density * count)
        ranks = {"down": kept, "at least one": max(1, kept), "one more": kept + 1}
        return (ranks[self.rounding],)

    def _voters(
        self, deltas: torch.Tensor, key: str, *, weights: tuple[float, ...], limits: Mapping[str, Thresholds]
    ) -> list[torch.Tensor]:
        rows = trim(deltas, limits[key])
        if self.weigh == "after":
            return rows
        return [row if weight == 1 else row * weight for row, weight in zip(rows, weights, strict=True)]

    def _majority(self, voters: _Voters, vectors: Vectors) -> float:
        """Sign that most coordinates of the whole model elect; in a tie minus, or 0 for a max."""
        if len(vectors.tasks) == 1:  # nothing cancels
            return 1.0
        lead = 0
        for block in vectors.blocks():
            sums = total(voters(block.deltas, block.site.key))
            lead += int((sums > 0).sum()) - int((sums < 0).sum())
        if lead == 0:
            return 0.0 if self.merge == "max" else -1.0
        return 1.0 if lead > 0 else -1.0


def _elected(rows: list[torch.Tensor], zero: float | None) -> torch.Tensor:
    """Elected signs; `zero`: the sign where entries sum to zero, None for plus."""
    if zero is None:
        return elect_sign(rows)
    sign = total(rows).sign_()
    zeros = torch.eq(sign, 0, out=torch.empty_like(sign))  # 1.0 where true
    return sign.add_(zeros, alpha=zero)


def ties(density: float = 0.2, scale: float = 1.0) -> Ties:
    """TIES as in the paper: trim over the whole model, elect a sign, average those that agree.

    `density`: share of entries that survive the trim; `scale`: lambda (about 1 for a disjoint mean).

    *Differs from the paper:* where trimmed entries cancel to exactly zero the elected sign is plus; the authors' code
    takes the sign that wins most coordinates of the model. Entries as large as the k-th largest are all kept, k =
    int(density * count); the authors' code keeps one more. `ties@fusionbench` follows it in both.
    """
    return Ties(density, scale)


def ties_sum(density: float = 0.2, scale: float = 0.3) -> Ties:
    """TIES with a disjoint sum: the convention of AdaMerging (arXiv 2310.02575), Surgery and MOMA.

    `density`: share of entries that survive the trim; `scale`: lambda (0.3 suits eight tasks).

    *Differs from the paper:* the entries that agree are added, not averaged; else as `ties`.
    """
    return Ties(density, scale, merge="sum")


def ties_per_tensor(density: float = 0.2, scale: float = 1.0) -> Ties:
    """TIES with each tensor trimmed separately, so that no layer is emptied by the others.

    `density`: share of each tensor's entries that survive the trim; `scale`: lambda.

    *Differs from the paper:* the trim; else as `ties`.
    """
    return Ties(density, scale, trim="tensor")


def ties_mergekit(
    density: float = 1.0, weights: tuple[float, ...] | None = None, normalize: bool = True, scale: float = 1.0
) -> Ties:
    """TIES as in mergekit 0.1.5: trim each tensor, weigh, elect, divide by the weights of those that agree.

    `density`: share of each tensor that survives; `weights`: one per expert, or 1; `scale`: lambda. mergekit calls the
    options `density`, `weight`, `normalize` and `lambda`.

    *Differs from the paper:* the trim is per tensor and keeps at least one entry; the weights multiply before the
    election; the sum of those that agree is divided by the sum of their weights (by nothing when not normalised, or
    when they sum to zero). A sum of zero elects plus. *Differs from mergekit:* all entries as large as the k-th are
    kept; it keeps exactly k, by an unstable sort.
    """
    return Ties(density, scale, weights, "mean" if normalize else "sum", trim="tensor", rounding="at least one")


def ties_peft(density: float = 0.2, weights: tuple[float, ...] | None = None) -> Ties:
    """TIES as in peft 0.21 (`peft.utils.merge_utils.ties`, `majority_sign_method="total"`).

    `density`: share of each tensor that survives the trim; `weights`: one per expert, by default 1.

    *Differs from the paper:* the trim is per tensor; the weights come after the election and are not divided out,
    so three experts at weight 1/3 give a third of the paper's result. A sum of zero elects plus. *Differs from PEFT:*
    all entries as large as the k-th are kept, and task vectors are merged, not the factors of LoRA adapters.
    """
    return Ties(density, weights=weights, trim="tensor", weigh="after")


def ties_fusionbench(density: float = 0.2, scale: float = 0.3, merge: Merge = "sum") -> Ties:
    """TIES as in FusionBench 0.2.33 (`ties_merging`) and the authors' code, to the last entry kept and the zero sums.

    `density`: share of entries that survive; `scale`: lambda; `merge`: what those that agree become. FusionBench calls
    the options `threshold`, `scaling_factor` and `merge_func`.

    *Differs from the paper:* one entry more survives; the default is the disjoint sum with lambda 0.3. Where entries
    cancel to exactly zero, the sign is the one elected by most coordinates of the model; when as many elect either, sum
    and mean take the negative entries and max gives zero. *Differs from FusionBench:* `density` is a share, never a
    percentage, and 1 keeps everything instead of failing.
    """
    return Ties(density, scale, merge=merge, rounding="one more", zero="majority")
