"""What a merge lost, what an aligner wins back of it, and what is left, each with a 95 % interval.

    lost = expert - merged,    won = aligned - merged,    left = expert - aligned = lost - won,    share = won / lost

in points of mean accuracy over tasks. Test inputs are resampled within each task, all three readings of an input
together, so the intervals are paired. A share of a loss that may be zero is no number: it is left out.

Letters: hits [n] of every task, booleans; R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from orthomerge.evaluation.statistics import bootstrap

Hits = NDArray[np.bool_]
_RESAMPLES = 10_000
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """Whether it is surely more than zero."""
        return self.low > 0

    @property
    def below(self) -> bool:
        return self.high < 0


@dataclass(frozen=True)
class Recovery:
    """In points; `share` (0 to 1, or beyond) is None where the loss is within its own noise."""

    lost: Estimate
    won: Estimate
    left: Estimate
    share: Estimate | None


def difference(first: Mapping[str, Hits], second: Mapping[str, Hits], *, seed: int = 0) -> Estimate:
    """Mean accuracy of the first minus that of the second, in points.

    Where the two hardly ever differ a bootstrap sees no spread: the interval is then Agresti and Min's.
    """
    found, _ = bootstrap(first, second, resamples=_RESAMPLES, seed=seed)
    low = min(found.low, found.estimate - _Z * found.error)
    high = max(found.high, found.estimate + _Z * found.error)
    return Estimate(100 * found.estimate, 100 * low, 100 * high)


def recovery(
    expert: Mapping[str, Hits], merged: Mapping[str, Hits], aligned: Mapping[str, Hits], *, seed: int = 0
) -> Recovery:
    """From the hits of the expert, of the merge as it is, and of the merge through an aligner."""
    lost = difference(expert, merged, seed=seed)
    won, left = difference(aligned, merged, seed=seed), difference(expert, aligned, seed=seed)
    return Recovery(lost, won, left, _share(expert, merged, aligned, seed=seed) if lost.above else None)


def _share(
    expert: Mapping[str, Hits], merged: Mapping[str, Hits], aligned: Mapping[str, Hits], *, seed: int
) -> Estimate:
    """The share over resamples in which there is a loss."""
    generator = np.random.default_rng(seed)
    lost, won = np.zeros(_RESAMPLES), np.zeros(_RESAMPLES)
    point_lost = point_won = 0.0
    for task in expert:
        rows = np.stack([expert[task], merged[task], aligned[task]]).astype(np.int64)
        n = rows.shape[1]
        # An input counts by which of the three were right: eight kinds of inputs, whose numbers are drawn.
        counts = np.bincount(rows[0] + 2 * rows[1] + 4 * rows[2], minlength=8)
        kinds = np.arange(8)
        e, m, a = kinds & 1, (kinds >> 1) & 1, kinds >> 2
        drawn = generator.multinomial(n, counts / n, size=_RESAMPLES) / n
        lost += drawn @ (e - m)
        won += drawn @ (a - m)
        point_lost += float(counts @ (e - m)) / n
        point_won += float(counts @ (a - m)) / n
    some = lost > 0
    low, high = np.quantile(won[some] / lost[some], [0.025, 0.975])
    return Estimate(point_won / point_lost, float(low), float(high))
