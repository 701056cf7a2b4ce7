"""Predictions of a classifier, and their accuracy as a share in [0, 1] with its interval (Wilson 1927)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist, mean

import torch

from orthomerge.core.errors import IncompatibleError
from orthomerge.models.heads import SINGLE_LABEL, Classifier, head_kind, logits_of

UNSCORED = -1  # prediction of an input whose label a protocol was given: it is not scored
_Z = NormalDist().inv_cdf(0.975)


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
