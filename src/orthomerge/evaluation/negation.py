"""Forgetting by negation: theta_0 - lambda tau, with the lambda that forgets the target most and spares the control.

Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089, Section 3: of a grid of lambda, that with
the lowest target accuracy whose control accuracy is at least 95 % of the pre-trained model's, both on validation data;
what is told is the accuracy on test data.

Differs from the paper: several control tasks count as one, whose accuracy is their mean. The paper's models read every
task by a frozen head of class names, and its control is ImageNet; where there is no such head, `base_heads` fits one on
the pre-trained features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.evaluation.metrics import Score
from orthomerge.evaluation.probe import fit_probe
from orthomerge.evaluation.scale import GRID
from orthomerge.evaluation.span import scales, score_at
from orthomerge.models.heads import head_of

if TYPE_CHECKING:
    from orthomerge.data.task import Split
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.evaluation.span import Span
    from orthomerge.models.heads import Extra, Head


KEEP = 0.95
_ROUNDING = 1e-9  # of shares that are equal but for the order of a sum


@dataclass(frozen=True)
class Point:
    """Accuracies on validation data at one scale; `control`: the mean of the control tasks."""

    scale: float
    target: float
    control: float


@dataclass(frozen=True)
class Negation:
    """Result of a search. `curve` starts at scale 0, the base; `base` and `edited` are by task, on test data."""

    target: str
    keep: float
    curve: tuple[Point, ...]
    scale: float
    base: Mapping[str, Score]
    edited: Mapping[str, Score]

    @property
    def controls(self) -> tuple[str, ...]:
        return tuple(task for task in self.base if task != self.target)

    @property
    def kept(self) -> float:
        """The share of the base's control accuracy that is left on test data."""
        return self._control(self.edited) / self._control(self.base)

    def _control(self, scores: Mapping[str, Score]) -> float:
        return fmean(scores[task].value for task in self.controls)


def base_heads(span: Span, encoded: EncodedTasks, readers: Mapping[str, Head | Extra]) -> dict[str, Head]:
    """For each task of `readers` a probe on the features of the span's origin, fitted on the train split; it reads the
    encoder as the given head does.
    """
    origin, heads = [0.0 for _ in span.directions], {}
    for task, reader in readers.items():
        encoded.labels(task, "train")
        data, head = encoded.tasks[task], head_of(reader)
        features = span.features(origin, data["train"], task=task, head=head, how=encoded.how)
        heads[task] = fit_probe(features, data.labels).reading_as(head)
    return heads


def search_negation(
    span: Span,
    heads: Mapping[str, Head | Extra],
    encoded: EncodedTasks,
    *,
    target: str,
    grid: Sequence[float] = GRID,
    keep: float = KEEP,
    title: str = "",
    progress: Progress = SILENT,
) -> Negation:
    """Walk the line theta_0 - lambda tau. The tasks are those of `heads`; all but the target are the control.

    If no scale of the grid keeps the control, or none forgets anything, the result is scale 0: the base as it is.
    """
    numbers = scales(grid)
    if not 0 < keep <= 1:
        raise RecipeError(f"the share of the control to keep must be in (0, 1], got {keep}")
    controls = tuple(task for task in heads if task != target)
    if target not in heads or not controls:
        raise RecipeError(f"negation needs the head of {target!r}, which is to be forgotten, and of a control task")
    for task in heads:
        for split in ("val", "test"):  # all of them before any work
            encoded.labels(task, split)
    curve = []
    for scale in numbers:
        scores = _scores(span, scale, heads, encoded, "val")
        if scale == 0:
            _check_control(encoded, scores, controls)
        point = Point(scale, scores[target].value, fmean(scores[task].value for task in controls))
        curve.append(point)
        text = f"scale {scale:g}: {target} {100 * point.target:.1f}, control {100 * point.control:.1f}"
        progress.stage(f"{title}: {text}" if title else text, None)
    spared = [point for point in curve if point.control >= keep * curve[0].control - _ROUNDING]
    best = min(spared, key=lambda point: (point.target, point.scale)).scale
    base, edited = (_scores(span, scale, heads, encoded, "test") for scale in (0.0, best))
    return Negation(target, keep, tuple(curve), best, base, edited)


def _scores(
    span: Span, scale: float, heads: Mapping[str, Head | Extra], encoded: EncodedTasks, split: Split
) -> dict[str, Score]:
    return {task: score_at(span, (scale,), head, encoded, task, split) for task, head in heads.items()}


def _check_control(encoded: EncodedTasks, scores: Mapping[str, Score], controls: Sequence[str]) -> None:
    """What the base cannot do, no edit can harm: such a control keeps nothing."""
    for task in controls:
        truth = encoded.labels(task, "val")
        usual = int(truth.bincount().max()) / len(truth)
        if scores[task].value <= usual:
            raise RecipeError(
                f"the base gets {scores[task].value:.1%} of the control {task!r} right on validation data, where the "
                f"most frequent class alone is {usual:.1%}: there is nothing to keep; choose a control that the base "
                "can do, or a head that was fitted on the base's features"
            )
