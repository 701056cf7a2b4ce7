"""What the outputs of a head mean: pure functions from logits to predictions, scores and targets.

Everything else treats logits as rows of numbers. One kind exists now; others are further entries of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError, nearest
from orthomerge.models.heads import SINGLE_LABEL

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prediction:
    """What one head says of one input: the label, its score, and the scores of all labels."""

    label: str
    score: float
    scores: Mapping[str, float]

    def __repr__(self) -> str:
        return f"{self.label} {self.score:.2f}"


class SingleLabel:
    """Exactly one label is true: a softmax over the labels. `metric`: the name of the headline metric."""

    metric = "accuracy"

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """KL(softmax(teacher) || softmax(student)) [n], which fits minimise (Hinton et al. 2015, arXiv 1503.02531)."""
        logs = teacher.log_softmax(-1)
        return (logs.exp() * (logs - student.log_softmax(-1))).sum(-1)

    def targets(self, teacher: torch.Tensor) -> torch.Tensor:
        """What least squares fits [n, C]: logits without what all labels share, which softmax does not see."""
        return teacher - teacher.mean(1, keepdim=True)

    def choices(self, logits: torch.Tensor) -> torch.Tensor:
        """The predicted row of labels [n]: that of the largest logit, the first of several equal ones."""
        if logits.ndim != 2 or not logits.shape[1]:
            raise IncompatibleError(f"logits must be [n, classes], got {tuple(logits.shape)}")
        wrong = logits.isnan().any(1)
        if wrong.any():
            raise NumericalError(f"{int(wrong.sum())} of {len(logits)} rows of logits hold NaN; they predict nothing")
        return logits.argmax(1)

    def right(self, chosen: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Which predictions are right, [n]; their mean is the headline metric."""
        return chosen == truth

    def decode(self, logits: torch.Tensor, labels: Sequence[str]) -> list[Prediction]:
        """Predictions that a person reads."""
        places = self.choices(logits).tolist()
        rows = logits.double().softmax(1).tolist()
        return [
            Prediction(labels[place], row[place], dict(zip(labels, row, strict=True)))
            for place, row in zip(places, rows, strict=True)
        ]


KINDS: Mapping[str, SingleLabel] = {SINGLE_LABEL: SingleLabel()}


def head_kind(name: str) -> SingleLabel:
    """A kind of head by its name; an unknown name offers the nearest."""
    if name not in KINDS:
        raise RecipeError(f"unknown kind of head {name!r}; {nearest(name, KINDS)}")
    return KINDS[name]
