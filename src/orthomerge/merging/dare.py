"""DARE: drop entries of the task vectors at random, enlarge the rest, merge.

Yu et al., "Language models are super Mario", 2023, arXiv 2311.03099: each entry of tau_t is dropped with probability p
and the others are divided by 1 - p, so that tau_t is kept in expectation; then task arithmetic, or the election of
signs of TIES (Yadav et al. 2023, arXiv 2306.01708). Each function below `Dare` is a row of the table of methods.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch

from orthomerge.core.checks import choices, finite, fraction
from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import PerExpert, disjoint, disjoint_mean, elect_sign, per_expert, scaled_sum, trim
from orthomerge.merging.kinds import Site, Surveyed, Vectors
from orthomerge.merging.statistics import Thresholds, kth_largest, runs

_TINY = 1e-7  # norms under this are not restored, as in mergekit
_NOTHING = 1e-8  # smaller sums of weights are not divided by, as in mergekit
_LANES = 8  # 32-bit numbers per step of the Philox counter


@dataclass(frozen=True)
class Dare:
    """DARE with an option for every point in which implementations differ.

    `density`: share of entries that stay, 1 - p; `normalize`: divide by the sum of the weights (in an election, of
    those that agree); `rescale`: divide what stays by `density`, restore each tensor's L1 norm, or neither; `elect`:
    add only what agrees with the sign of the sum of weighted or unweighted entries (if unweighted, the weighted sum is
    divided by their count); `trim`: share of the dropped vector, zeros included, that survives a trim over the model.
    """

    density: float = 0.5
    scale: float = 1.0
    weights: PerExpert | None = None
    normalize: bool = False
    rescale: Literal["density", "norm", "no"] = "density"
    elect: Literal["no", "weighted", "unweighted"] = "no"
    trim: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        fraction(density=self.density, trim=self.trim)
        finite(scale=self.scale, weights=self.weights or 1.0)
        choices(self)
        if self.normalize and self.elect == "unweighted":
            raise RecipeError("'normalize' must be false where 'elect' is 'unweighted', which divides by a count")

    def survey(self, vectors: Vectors) -> Surveyed:
        weights = per_expert(1.0 if self.weights is None else self.weights, len(vectors.tasks))
        if self.normalize and self.elect == "no" and abs(share := sum(weights)) >= _NOTHING:
            weights = tuple(weight / share for weight in weights)
        factors, limits = self._factors(vectors), self._limits(vectors)
        keep = self.density if self.rescale == "density" else 1.0

        def merge(base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
            pairs = list(zip(weights, factors.get(site.key, (1.0,) * len(deltas)), strict=True))
            rows = trim(self.dropped(deltas, site), limits)
            if self.elect == "no":
                return scaled_sum(rows, tuple(self.scale * weight * factor / keep for weight, factor in pairs))
            numbers = [weight * factor for weight, factor in pairs]
            if self.elect == "unweighted":
                shares = [number / keep for number in numbers]
                return disjoint_mean(rows, elect_sign(rows), factors=shares).mul_(self.scale)
            rows = [row if number == 1 else row * number for row, number in zip(rows, numbers, strict=True)]
            sign = elect_sign(rows)
            agreeing = disjoint_mean(rows, sign, votes=weights) if self.normalize else disjoint(rows, sign)
            return agreeing.mul_(self.scale / keep)

        return Surveyed(merge)

    def dropped(self, deltas: torch.Tensor, site: Site) -> list[torch.Tensor]:
        """Keep each entry with probability `density`, and zero the others, without rescaling."""
        if self.density >= 1:
            return list(deltas)
        rows = []
        for task, row in zip(site.tasks, deltas, strict=True):
            mask = keep_mask(site, task, row.numel(), keep=self.density, seed=self.seed)
            # As bytes a mask turns into numbers seven times faster than as booleans.
            rows.append(mask.view(torch.uint8).to(row.dtype).reshape(row.shape).mul_(row))
        return rows

    def _factors(self, vectors: Vectors) -> dict[str, tuple[float, ...]]:
        """Factors by tensor and expert that restore the L1 norm; empty if norms are not restored."""
        if self.density >= 1 or self.rescale != "norm":
            return {}
        norms: dict[str, torch.Tensor] = {}  # before and after, [2, T]
        for site, rows in runs(vectors):
            magnitudes, count = rows[1:].abs(), rows.shape[1]
            masks = [keep_mask(site, task, count, keep=self.density, seed=self.seed) for task in vectors.tasks]
            before = magnitudes.sum(1)
            after = magnitudes.mul_(torch.stack(masks).view(torch.uint8)).sum(1)
            norms[site.key] = norms.get(site.key, 0.0) + torch.stack([before, after])
        return {
            key: tuple(1.0 if min(pair) < _TINY else pair[0] / pair[1] for pair in both.T.tolist())
            for key, both in norms.items()
        }

    def _limits(self, vectors: Vectors) -> Thresholds:
        """Thresholds of the trim, from the dropped vectors before they are rescaled, which keeps their order."""
        if self.trim >= 1:
            return (0.0,) * len(vectors.tasks)

        def stream() -> Iterator[torch.Tensor]:
            for block in vectors.blocks():
                yield torch.stack(self.dropped(block.deltas, block.site))

        count = sum(prod(shape) for shape in vectors.shapes.values())
        sample = ((block.site, torch.stack(self.dropped(block.deltas, block.site))) for block in vectors.sample())
        ranks = (int(self.trim * count),)
        return kth_largest(stream, ranks, rows=len(vectors.tasks), count=count, sample=sample)[0]


def keep_mask(site: Site, task: str, count: int, *, keep: float, seed: int) -> torch.Tensor:
    """Draw a Bernoulli(`keep`) mask for `count` elements from `site.start` on, independent of blocks and order.

    The counter-based generator (Philox, Salmon et al. 2011) is keyed by a hash of seed, tensor name and expert name;
    element i of the tensor takes its i-th 32-bit number.
    """
    digest = hashlib.sha256(f"{seed}\0{site.key}\0{task}".encode()).digest()
    first, skip = divmod(site.start, _LANES)
    # The counter is one 256-bit number, lowest word first.
    generator = np.random.Philox(
        key=np.frombuffer(digest[:16], dtype=np.uint64), counter=np.array([first, 0, 0, 0], dtype=np.uint64)
    )
    words = generator.random_raw(-(-(count + skip) // 2))
    return torch.from_numpy(words.view("<u4")[skip : skip + count] < min(round(keep * 2**32), 2**32))


def dare(drop: float = 0.5, scale: PerExpert = 0.3, seed: int = 0) -> Dare:
    """DARE as in the paper: drop at random, divide by 1 - p, add.

    `drop`: p, the share of entries to drop; `scale`: lambda, one or one per expert.
    """
    fraction(drop=drop, zero=True, one=False)
    finite(scale=scale)
    return Dare(1 - drop, weights=scale, seed=seed)


def dare_ties(drop: float = 0.5, density: float = 0.2, scale: float = 0.5, seed: int = 0) -> Dare:
    """DARE before TIES: section 4.3 of the paper, with the defaults of FusionBench.

    `drop`: p; `density`: share that survives the trim; `scale`: lambda.

    *Differs from the paper:* the TIES that follows, which the paper leaves open, is the disjoint sum of `ties_sum`. The
    trim counts dropped entries as zeros: with `density` above 1 - `drop` it keeps all that was not dropped.
    """
    fraction(drop=drop, zero=True, one=False)
    fraction(density=density)
    return Dare(1 - drop, scale, elect="weighted", trim=density, seed=seed)


def dare_mergekit(
    density: float = 1.0,
    weights: tuple[float, ...] | None = None,
    normalize: bool = False,
    rescale: bool = True,
    seed: int = 0,
    scale: float = 1.0,
) -> Dare:
    """DARE as in mergekit 0.1.5 (`dare_linear`): drop at random, restore each tensor's L1 norm, weigh, add.

    `density`: share of entries that stay; `scale`: lambda. mergekit calls `weights` and `scale` `weight` and `lambda`.

    *Differs from the paper:* what is left of a tensor is multiplied by (L1 norm before) / (L1 norm after), not divided
    by the density; `normalize` divides by the sum of the weights. *Differs from mergekit:* the draws, which there
    depend on the order of the merge; norms are summed in float64.
    """
    return Dare(density, scale, weights, normalize, "norm" if rescale else "no", seed=seed)


def dare_ties_mergekit(
    density: float = 1.0,
    weights: tuple[float, ...] | None = None,
    normalize: bool = False,
    rescale: bool = True,
    seed: int = 0,
    scale: float = 1.0,
) -> Dare:
    """DARE with an election as in mergekit 0.1.5 (`dare_ties`): drop at random, restore the L1 norm, weigh, elect, add.

    `density`: share of entries that stay; `scale`: lambda. mergekit calls `weights` and `scale` `weight` and `lambda`.

    *Differs from the paper:* nothing is trimmed by magnitude; norms are restored as in `dare@mergekit`; weights
    multiply before the sign is elected. Those that agree are added; `normalize` divides by the sum of their weights.
    """
    return Dare(density, scale, weights, normalize, "norm" if rescale else "no", "weighted", seed=seed)


def dare_peft(density: float = 0.5, weights: tuple[float, ...] | None = None, seed: int = 0) -> Dare:
    """DARE as in peft 0.21 (`peft.utils.merge_utils.dare_linear`): drop at random, divide by the density, weigh, add.

    `density`: share of entries that stay, 1 - p; `weights`: lambda, one per expert.

    *Differs from PEFT:* the draws, which there depend on what was drawn before.
    """
    return Dare(density, weights=weights, seed=seed)


def dare_ties_peft(density: float = 0.5, weights: tuple[float, ...] | None = None, seed: int = 0) -> Dare:
    """DARE with an election as in peft 0.21 (`peft.utils.merge_utils.dare_ties`, `majority_sign_method="total"`).

    `density`: share of entries that stay.

    *Differs from the paper:* nothing is trimmed by magnitude; election, weights and count as in `ties@peft`.
    *Differs from PEFT:* the draws, which there depend on what was drawn before.
    """
    return Dare(density, weights=weights, elect="unweighted", seed=seed)
