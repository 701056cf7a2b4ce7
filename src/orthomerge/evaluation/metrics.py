"""Predictions, their accuracy as a share in [0, 1] with its interval, and paired tests of two methods.

Wilson 1927 (interval of a share), McNemar 1947 (exact), Holm 1979, Schuirmann 1987 (two one-sided tests), Owen 2007
(bootstrap of crossed factors), Agresti and Min 2005 (variance of a paired difference that does not vanish).

In tests, hits are a boolean array [n] per task, or [seeds, n] where a method was fitted with several seeds. Item i is
the same input for both methods, seed s the same draw of support. Differences are first minus second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from statistics import NormalDist, mean
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from orthomerge.core.errors import IncompatibleError
from orthomerge.models.heads import SINGLE_LABEL, Classifier, head_kind, logits_of

Name = TypeVar("Name", bound=Hashable)

UNSCORED = -1  # prediction of an input whose label a protocol was given: it is not scored
_Z = NormalDist().inv_cdf(0.975)
_MOST = 1 << 22  # multinomial counts in memory at once
_QUANTILES = ((1 - 0.95) / 2, (1 + 0.95) / 2)  # of a 95 % interval


@dataclass(frozen=True)
class Score:
    """An accuracy with Wilson's 95 % interval, counted on `examples` inputs."""

    value: float
    low: float
    high: float
    examples: int


def predict(classifier: Classifier, values: torch.Tensor, kind: str = SINGLE_LABEL) -> torch.Tensor:
    """Predict labels [n] for features [n, d], on the CPU. `kind`: what the logits mean."""
    return head_kind(kind).choices(logits_of(classifier, values)).cpu()


def hits(predicted: torch.Tensor, labels: torch.Tensor, kind: str = SINGLE_LABEL) -> torch.Tensor:
    if predicted.ndim != 1 or predicted.shape != labels.shape or not len(labels):
        raise IncompatibleError(
            f"predictions and labels must be two lists of the same length, at least 1, "
            f"got {tuple(predicted.shape)} and {tuple(labels.shape)}"
        )
    return head_kind(kind).right(predicted, labels)


def counted(predicted: torch.Tensor, labels: torch.Tensor, kind: str = SINGLE_LABEL) -> Score:
    correct = int(hits(predicted, labels, kind).sum())
    return Score(correct / len(labels), *wilson(correct, len(labels)), examples=len(labels))


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share `correct / total`."""
    share = correct / total
    middle = share + _Z * _Z / (2 * total)
    half = _Z * math.sqrt(share * (1 - share) / total + _Z * _Z / (4 * total * total))
    width = 1 + _Z * _Z / total
    low = 0.0 if correct == 0 else (middle - half) / width
    high = 1.0 if correct == total else (middle + half) / width
    return low, high


def mean_interval(scores: Collection[Score]) -> tuple[float, float, float]:
    """Return the mean m of scores v_t of T tasks with its 95 % interval (Zou and Donner 2008, MOVER).

    With [l_t, u_t] the interval of v_t, the lower end is m - sqrt(sum_t (v_t - l_t)^2) / T, the upper end likewise.
    """
    middle = mean(score.value for score in scores)
    low = middle - math.hypot(*(score.value - score.low for score in scores)) / len(scores)
    high = middle + math.hypot(*(score.high - score.value for score in scores)) / len(scores)
    return middle, low, high


@dataclass(frozen=True)
class Difference:
    """Difference in accuracy with its 95 % interval, standard error and two-sided p-value."""

    estimate: float
    low: float
    high: float
    error: float
    p: float


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests: `p_below` against "worse by the margin or more", `p_above` against "better by as much"."""

    margin: float
    alpha: float
    p_below: float
    p_above: float

    @property
    def comparable(self) -> bool:
        return max(self.p_below, self.p_above) < self.alpha


def mcnemar(first_only: int, second_only: int) -> float:
    """Exact p = min(1, 2 P(X <= min)), X ~ Binomial(n, 1/2), from counts of inputs that only one method got right."""
    n, fewer = first_only + second_only, min(first_only, second_only)
    term = total = 1
    for i in range(fewer):
        term = term * (n - i) // (i + 1)
        total += term
    return min(1.0, 2 * total / (1 << n))


def mcnemar_hits(first: ArrayLike, second: ArrayLike) -> float:
    """McNemar's exact p from hits; with several seeds an input counts for the method with more hits (sign test)."""
    leads = _gaps(first, second).sum(0, dtype=np.int64)
    return mcnemar(int((leads > 0).sum()), int((leads < 0).sum()))


def bootstrap(
    first: Mapping[str, ArrayLike], second: Mapping[str, ArrayLike], *, resamples: int = 10_000, seed: int = 0
) -> tuple[Difference, dict[str, Difference]]:
    """Bootstrap the paired difference in mean accuracy, and that of every task.

    Items are resampled per task, seeds for all tasks together. Inputs with the same differences under every seed are
    interchangeable, so their counts are drawn (multinomial). `error` is the standard deviation over resamples, but not
    below Agresti and Min's, which is positive even where the methods never differ.
    """
    tables = {task: _gaps(first[task], second[task]) for task in first}
    seeds = max(len(table) for table in tables.values())
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples) / seeds
    draws = {
        task: _resampled(np.broadcast_to(table, (seeds, table.shape[1])), weights, generator)
        for task, table in tables.items()
    }
    variances = {task: _variance(table) for task, table in tables.items()}
    by_task = {
        task: _difference(float(table.mean()), draws[task], math.sqrt(variances[task]))
        for task, table in tables.items()
    }
    mean = math.fsum(gap.estimate for gap in by_task.values()) / len(tables)
    floor = math.sqrt(math.fsum(variances.values())) / len(tables)
    total: NDArray[np.float64] = np.sum(list(draws.values()), axis=0)
    return _difference(mean, total / len(tables), floor), by_task


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Adjust p-values by Holm's step-down procedure, so that all can be compared with one significance level."""
    adjusted, least = {}, 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - place) * p))
        adjusted[name] = least
    return {name: adjusted[name] for name in p_values}


def tost(difference: Difference, *, margin: float = 0.005, alpha: float = 0.05) -> Equivalence:
    """Test whether the absolute difference is smaller than `margin`, by a normal approximation."""
    normal = NormalDist()
    return Equivalence(
        margin=margin,
        alpha=alpha,
        p_below=normal.cdf(-(difference.estimate + margin) / difference.error),
        p_above=normal.cdf((difference.estimate - margin) / difference.error),
    )


def _difference(estimate: float, draws: NDArray[np.float64], floor: float) -> Difference:
    low, high = np.quantile(draws, _QUANTILES)
    tail = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    return Difference(
        estimate=estimate,
        low=float(low),
        high=float(high),
        error=max(float(draws.std(ddof=1)), floor),
        p=min(1.0, 2 * (1 + tail) / (1 + len(draws))),
    )


def _resampled(
    table: NDArray[np.int8], weights: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return one task's difference in every resample: weights^T [S] table [S, n] counts [n] / n."""
    n = table.shape[1]
    groups, sizes = np.unique(table, axis=1, return_counts=True)
    differences, step = [], max(1, _MOST // len(sizes))
    for start in range(0, len(weights), step):
        part = weights[start : start + step]
        counts = generator.multinomial(n, sizes / n, size=len(part))
        differences.append(((part @ groups) * counts).sum(1) / n)
    return np.concatenate(differences)


def _variance(table: NDArray[np.int8]) -> float:
    """Variance of one task's difference by Agresti and Min: half an input added to each cell of the 2 x 2 table."""
    gaps, n = table.mean(0, dtype=np.float64), int(table.shape[1]) + 2
    return (float(gaps @ gaps) + 1 - float(gaps.sum()) ** 2 / n) / n**2


def _gaps(first: ArrayLike, second: ArrayLike) -> NDArray[np.int8]:
    """Hits of the first minus hits of the second [seeds or 1, n]."""
    one, other = np.atleast_2d(np.asarray(first, dtype=np.int8), np.asarray(second, dtype=np.int8))
    gaps: NDArray[np.int8] = one - other
    return gaps
