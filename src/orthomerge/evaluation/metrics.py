"""Accuracy and what belongs beside it. Every figure is a share in [0, 1]; every scored input counts, none is dropped.

Wilson 1927 for the interval of one accuracy; Guo et al. 2017, arXiv 1706.04599, for the calibration error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError, some
from orthomerge.models.heads import SINGLE_LABEL, Classifier, logits_of
from orthomerge.models.kinds import head_kind

UNSCORED = -1  # stands for the prediction of an input whose label a protocol was shown


@dataclass(frozen=True)
class Score:
    """An accuracy with Wilson's 95 % interval, counted on `examples` inputs."""

    value: float
    low: float
    high: float
    examples: int


def predictions(logits: torch.Tensor, kind: str = SINGLE_LABEL) -> torch.Tensor:
    """The predicted row of labels for each input [n]; `kind`: of the head that gave the logits."""
    return head_kind(kind).choices(logits)


def predict(classifier: Classifier, values: torch.Tensor, kind: str = SINGLE_LABEL) -> torch.Tensor:
    """The prediction for every row of features [n, d], on the CPU."""
    return predictions(logits_of(classifier, values), kind).cpu()


def scored(predicted: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels without the inputs that were support and must not count."""
    _same(predicted, labels)
    kept = predicted != UNSCORED
    return predicted[kept], labels[kept]


def hits(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which predictions are right [n]."""
    _same(predicted, labels)
    if (predicted == UNSCORED).any():
        count = int((predicted == UNSCORED).sum())
        raise IncompatibleError(f"{count} of {len(labels)} inputs were support and are unscored; take `scored` first")
    return predicted == labels


def accuracy(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of predictions that are right."""
    return int(hits(predicted, labels).sum()) / len(labels)


def counted(predicted: torch.Tensor, labels: torch.Tensor) -> Score:
    """Accuracy with its interval."""
    right = int(hits(predicted, labels).sum())
    return Score(right / len(labels), *wilson(right, len(labels)), examples=len(labels))


def wilson(right: int, total: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of `right` in `total`."""
    if not 0 <= right <= total or total < 1:
        raise RecipeError(f"hits must be in 0..{total} of at least one input, got {right} of {total}")
    if not 0 < confidence < 1:
        raise RecipeError(f"'confidence' must be in (0, 1), got {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = right / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    width = 1 + z * z / total
    low = 0.0 if right == 0 else (middle - half) / width
    high = 1.0 if right == total else (middle + half) / width
    return low, high


def expected_calibration_error(logits: torch.Tensor, labels: torch.Tensor, *, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over `bins` equal steps of confidence, weighted by their inputs."""
    if bins < 1:
        raise RecipeError(f"'bins' must be at least 1, got {bins}")
    right = hits(predictions(logits), labels).double()
    confidence = logits.double().softmax(1).amax(1)
    places = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, places, right - confidence)
    return float(gaps.abs().sum() / len(labels))


def mean_accuracy(accuracies: Mapping[str, float]) -> float:
    """Unweighted mean over tasks."""
    if not accuracies:
        raise RecipeError("a mean over tasks needs at least one task, got none")
    return math.fsum(accuracies.values()) / len(accuracies)


def normalised_accuracy(accuracies: Mapping[str, float], experts: Mapping[str, float]) -> float:
    """Mean over tasks of the accuracy divided by that task's expert's; not the ratio of the means."""
    if accuracies.keys() != experts.keys():
        raise IncompatibleError(f"accuracies and experts differ in tasks: {some(accuracies.keys() ^ experts.keys())}")
    for task, value in experts.items():
        if not value > 0:
            raise NumericalError(f"the expert of {task!r} has accuracy {value}; nothing can be measured by it")
    return mean_accuracy({task: value / experts[task] for task, value in accuracies.items()})


def worst_task(accuracies: Mapping[str, float]) -> tuple[str, float]:
    """The task with the lowest accuracy (the first of several), and that accuracy."""
    if not accuracies:
        raise RecipeError("the worst of no tasks does not exist; give at least one")
    return min(accuracies.items(), key=lambda item: item[1])


def _same(predicted: torch.Tensor, labels: torch.Tensor) -> None:
    if predicted.ndim != 1 or predicted.shape != labels.shape or not len(labels):
        raise IncompatibleError(
            f"predictions and labels must be two lists of the same length, at least 1, "
            f"got {tuple(predicted.shape)} and {tuple(labels.shape)}"
        )
