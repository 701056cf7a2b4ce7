"""Forgetting by negation: theta_0 - lambda tau, with the lambda that forgets the target most and spares the control.

Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089, Section 3: of a grid of lambda, that with
the lowest target accuracy whose control accuracy is at least 95 % of the pre-trained model's, both on validation data;
what is told is the accuracy on test data.

Differs from the paper: several control tasks count as one, whose accuracy is their mean. The paper's models read every
task by a frozen head of class names, and its control is ImageNet; where there is no such head, `base_heads` fits one on
the pre-trained features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from orthomerge.data.task import Split
from orthomerge.errors import RecipeError
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.metrics import Score
from orthomerge.evaluation.probe import fit_probe
from orthomerge.evaluation.scale import GRID
from orthomerge.evaluation.span import Span, arithmetic, labelled, scales, score, span_of
from orthomerge.heads import Classifier, Head
from orthomerge.merged import Merged
from orthomerge.recipe import Recipe

__all__ = ["KEEP", "Negation", "Point", "base_heads", "negated", "negation_span", "search_negation"]

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
    """What a search found. `curve` starts at scale 0, the base; `base` and `edited` are by task, on test data."""

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


def negated(recipe: Recipe, target: str, scale: float) -> Recipe:
    """The recipe of theta_0 - scale * tau_target; its other experts only give their heads."""
    return arithmetic(recipe, {target: 0.0 - scale})


def negation_span(recipe: Recipe, target: str, folder: Path) -> Span:
    """The line theta_0 - lambda tau_target; the merges that it is made of are left in `folder`."""
    return span_of(folder, negated(recipe, target, 0.0), negated(recipe, target, 1.0))


def base_heads(span: Span, bench: Bench, tasks: Iterable[str]) -> dict[str, Head]:
    """For each task a probe on the features of the span's origin, fitted on the train split."""
    model = span.at(*(0.0 for _ in span.directions))
    return {
        task: fit_probe(bench.encode(model, task, labelled(bench, task, "train")[0]), bench.tasks[task].labels)
        for task in tasks
    }


def search_negation(
    span: Span,
    bench: Bench,
    heads: Mapping[str, Classifier],
    *,
    target: str,
    grid: Sequence[float] = GRID,
    keep: float = KEEP,
    say: Callable[[str], None] = lambda text: None,
) -> Negation:
    """Walk a line of one direction. The tasks are those of `heads`; all but the target are the control.

    Where no scale of the grid keeps the control, or none forgets anything, the result is scale 0: the base as it is.
    """
    numbers = scales(grid)
    if not 0 < keep <= 1:
        raise RecipeError(f"the share of the control to keep must be in (0, 1], got {keep}")
    controls = tuple(task for task in heads if task != target)
    if target not in heads or not controls:
        raise RecipeError(f"negation needs the head of {target!r}, which is to be forgotten, and of a control task")
    for task in heads:
        for split in ("val", "test"):  # all of them before any work
            labelled(bench, task, split)
    curve = []
    for scale in numbers:
        found = _measured(bench, span.at(scale), heads, "val")
        if scale == 0:
            _check_control(bench, found, controls)
        curve.append(Point(scale, found[target].value, fmean(found[task].value for task in controls)))
        say(f"scale {scale:g}: {target} {100 * curve[-1].target:.1f}, control {100 * curve[-1].control:.1f}")
    spared = [point for point in curve if point.control >= keep * curve[0].control - _ROUNDING]
    best = min(spared, key=lambda point: (point.target, point.scale)).scale
    base, edited = (_measured(bench, span.at(scale), heads, "test") for scale in (0.0, best))
    return Negation(target, keep, tuple(curve), best, base, edited)


def _measured(bench: Bench, model: Merged, heads: Mapping[str, Classifier], split: Split) -> dict[str, Score]:
    return {task: score(bench, model, head, task, split) for task, head in heads.items()}


def _check_control(bench: Bench, found: Mapping[str, Score], controls: Sequence[str]) -> None:
    """What the base cannot do, no edit can harm: such a control keeps nothing."""
    for task in controls:
        truth = labelled(bench, task, "val")[1]
        usual = int(truth.bincount().max()) / len(truth)
        if found[task].value <= usual:
            raise RecipeError(
                f"the base gets {found[task].value:.1%} of the control {task!r} right on validation data, where the "
                f"most frequent class alone is {usual:.1%}: there is nothing to keep; choose a control that the base "
                "can do, or a head that was fitted on the base's features"
            )
