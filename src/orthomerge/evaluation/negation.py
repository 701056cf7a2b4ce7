"""Forgetting by negation: theta_0 - lambda tau, with the lambda that forgets the target most and spares the control.

Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089, Section 3: of a grid of lambda, that with
the lowest target accuracy whose control accuracy is at least 95 % of the pre-trained model's, both on validation data;
what is reported is the accuracy on test data.

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
from orthomerge.evaluation.span import arithmetic, scales, span_of
from orthomerge.models.heads import head_of

if TYPE_CHECKING:
    from orthomerge.data.task import Split
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.evaluation.span import Span
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Extra, Head
    from orthomerge.models.model import Model


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


@dataclass(frozen=True, eq=False)
class Negated:
    """The search along the task vector and, beside it, along a random vector of the same length.

    `model`: the base minus the task vector at the chosen scale; None if that is 0.
    """

    search: Negation
    random: Negation
    model: Model | None


def negate_task(
    experts: Experts,
    target: str,
    encoded: EncodedTasks,
    *,
    probes: bool,
    grid: Sequence[float] = GRID,
    keep: float = KEEP,
    dtype: str = "keep",
    seed: int = 0,
    progress: Progress = SILENT,
) -> Negated:
    """Negate the task vector of a target, with all other tasks as control; `probes`: score with probes on the base's
    features instead of the experts' heads.
    """
    span = span_of(arithmetic(experts, {}), arithmetic(experts, {target: -1.0}, seed=seed))
    # Probes of tasks without an expert read the encoder as the target's head does.
    heads: Mapping[str, Head | Extra] = {task: experts.heads.get(task, experts.heads[target]) for task in encoded.tasks}
    if probes:
        heads = base_heads(span, encoded, heads)
    search, random = (
        search_negation(line, heads, encoded, target=target, grid=grid, keep=keep, title=title, progress=progress)
        for line, title in ((span, f"minus {target}"), (span.random(seed=seed), "random vector"))
    )
    model = arithmetic(experts, {target: -search.scale}, dtype=dtype, seed=seed) if search.scale else None
    return Negated(search, random, model)


def base_heads(span: Span, encoded: EncodedTasks, readers: Mapping[str, Head | Extra]) -> dict[str, Head]:
    """For each task of `readers` a probe on the features of the span's origin, fitted on the train split; it reads the
    encoder as the given head does.
    """
    origin, heads = [0.0 for _ in span.directions], {}
    for task, reader in readers.items():
        encoded.labels(task, "train")  # must be there
        features = span.features(origin, encoded, task, "train", reader)
        heads[task] = fit_probe(features, encoded.tasks[task].labels).reading_as(head_of(reader))
    return heads


def search_negation(
    span: Span,
    heads: Mapping[str, Head | Extra],
    encoded: EncodedTasks,
    *,
    target: str,
    grid: Sequence[float] = GRID,
    keep: float = KEEP,
    title: str = "negation",
    progress: Progress = SILENT,
) -> Negation:
    """Walk the line theta_0 - lambda tau. The tasks are those of `heads`; all but the target are the control.

    If no scale of the grid keeps the control, or none forgets anything, the result is scale 0: the base as it is.
    """
    grid = scales(grid)
    if not 0 < keep <= 1:
        raise RecipeError(f"the share of the control to keep must be in (0, 1], got {keep}")
    controls = tuple(task for task in heads if task != target)
    if target not in heads or not controls:
        raise RecipeError(f"negation needs the head of {target!r}, which is to be forgotten, and of a control task")
    for task in heads:
        for split in ("val", "test"):  # all of them before any work
            encoded.labels(task, split)

    def scores_at(scale: float, split: Split) -> dict[str, Score]:
        return {task: span.score((scale,), encoded, task, split, head) for task, head in heads.items()}

    curve = []
    for scale in grid:
        scores = scores_at(scale, "val")
        if scale == 0:
            _check_control(encoded, scores, controls)
        point = Point(scale, scores[target].value, fmean(scores[task].value for task in controls))
        curve.append(point)
        text = f"scale {scale:g}: {target} {100 * point.target:.1f}, control {100 * point.control:.1f}"
        progress.stage(f"{title}: {text}", None)
    spared = [point for point in curve if point.control >= keep * curve[0].control - _ROUNDING]
    best = min(spared, key=lambda point: (point.target, point.scale)).scale
    return Negation(target, keep, tuple(curve), best, base=scores_at(0.0, "test"), edited=scores_at(best, "test"))


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
