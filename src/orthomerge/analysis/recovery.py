"""Loss of a merge, the part of it that an aligner recovers, and what remains, each with a 95 % interval.

    lost = expert - merged,    won = aligned - merged,    left = expert - aligned = lost - won,    share = won / lost

in points of mean accuracy over tasks. Test inputs are resampled within each task, the three predictions of an input
together, so the intervals are paired. If the loss may be zero, the share is undefined and left out.

Letters: hits [n] of every task, booleans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from orthomerge.evaluation.metrics import bootstrap

Hits = NDArray[np.bool_]
HitsByTask = Mapping[str, Hits]
_RESAMPLES = 10_000
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        return self.low > 0

    @property
    def below(self) -> bool:
        return self.high < 0

    def choose(self, *, above: str, below: str, tie: str) -> str:
        if self.above:
            return above
        return below if self.below else tie

    def __neg__(self) -> Estimate:
        return Estimate(-self.value, -self.high, -self.low)

    def __str__(self) -> str:
        return f"{_rounded(self.value, 1)} points ({self.interval()})"

    def interval(self, digits: int = 1) -> str:
        return f"{_rounded(self.low, digits)} to {_rounded(self.high, digits)}"

    def numbers(self, name: str) -> dict[str, float]:
        return {name: self.value, f"{name}, low": self.low, f"{name}, high": self.high}


@dataclass(frozen=True)
class Recovery:
    """Differences in points; `share` in percent, None if the loss may be zero."""

    lost: Estimate
    won: Estimate
    left: Estimate
    share: Estimate | None


def difference(first: HitsByTask, second: HitsByTask, *, seed: int = 0) -> Estimate:
    """Return the mean accuracy of the first minus that of the second, in points.

    If the two hardly ever differ, the bootstrap has no spread; the interval is then Agresti and Min's.
    """
    gap, _ = bootstrap(first, second, resamples=_RESAMPLES, seed=seed)
    low, high = min(gap.low, gap.estimate - _Z * gap.error), max(gap.high, gap.estimate + _Z * gap.error)
    return Estimate(100 * gap.estimate, 100 * low, 100 * high)


def recovery(expert: HitsByTask, merged: HitsByTask, aligned: HitsByTask, *, seed: int = 0) -> Recovery:
    lost = difference(expert, merged, seed=seed)
    won, left = difference(aligned, merged, seed=seed), difference(expert, aligned, seed=seed)
    return Recovery(lost, won, left, _share(expert, merged, aligned, seed=seed) if lost.above else None)


def _share(expert: HitsByTask, merged: HitsByTask, aligned: HitsByTask, *, seed: int) -> Estimate:
    """Return won / lost in percent; its interval is over the resamples that have a loss."""
    generator = np.random.default_rng(seed)
    patterns = np.arange(8)  # one bit per classifier that is right; inputs of the same pattern are interchangeable
    e, m, a = patterns & 1, (patterns >> 1) & 1, patterns >> 2
    lost, won = np.zeros(_RESAMPLES), np.zeros(_RESAMPLES)
    point_lost = point_won = 0.0
    for task in expert:
        rows = np.stack([expert[task], merged[task], aligned[task]]).astype(np.int64)
        n = rows.shape[1]
        counts = np.bincount(rows[0] + 2 * rows[1] + 4 * rows[2], minlength=8)
        shares = generator.multinomial(n, counts / n, size=_RESAMPLES) / n
        lost += shares @ (e - m)
        won += shares @ (a - m)
        point_lost += float(counts @ (e - m)) / n
        point_won += float(counts @ (a - m)) / n
    has_loss = lost > 0
    low, high = np.quantile(won[has_loss] / lost[has_loss], [0.025, 0.975])
    return Estimate(100 * (point_won / point_lost), 100 * float(low), 100 * float(high))


def _rounded(value: float, digits: int) -> str:
    """Format a rounded number, never as -0."""
    return f"{round(value, digits) + 0.0:.{digits}f}"
