"""Edit models with task arithmetic: forget a task by negation, make a model without training data by analogy.

Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089. Coefficients are chosen on validation
data; accuracies are reported on test data.

Negation (Section 3): theta_0 - lambda tau. The lambda with the lowest target accuracy is chosen from a grid, among
those whose control accuracy is at least 95 % of the pre-trained model's.
Differs from the paper: several control tasks count as one, whose accuracy is their mean. The paper's models have frozen
heads made of class names, and its control is ImageNet; without such heads `base_heads` fits heads to the pre-trained
features.

Analogy (Section 5), "A is to B as C is to D": theta_0 + lambda tau_C + mu (tau_B - tau_A), for a D without training
data, with the head of C. One coefficient for the whole sum, mu = lambda, or (their sentiment experiments) two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Split
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import Score
from orthomerge.evaluation.probe import fit_probe
from orthomerge.evaluation.scale import GRID, Span, arithmetic, scales, span_of
from orthomerge.models.experts import Experts
from orthomerge.models.heads import Extra, Head, head_of
from orthomerge.models.model import Model

KEEP = 0.95
_ROUNDING = 1e-9  # tolerance for equal shares whose sums were added in another order
_SEARCHED: tuple[Split, ...] = ("val", "test")
_FORM = re.compile(r"([^:]+):([^:]+)::([^:]+)")


@dataclass(frozen=True)
class NegationPoint:
    """Accuracies on validation data at one scale; `control`: the mean of the control tasks."""

    scale: float
    target: float
    control: float


@dataclass(frozen=True)
class Negation:
    """Result of a search. `curve` starts at scale 0, the base; `base` and `edited`: test scores by task."""

    target: str
    keep: float
    curve: tuple[NegationPoint, ...]
    scale: float
    base: Mapping[str, Score]
    edited: Mapping[str, Score]

    @property
    def controls(self) -> tuple[str, ...]:
        return tuple(task for task in self.base if task != self.target)

    @property
    def kept(self) -> float:
        """Share of the base's control accuracy that the edited model keeps on test data."""
        edited, base = (fmean(scores[task].value for task in self.controls) for scores in (self.edited, self.base))
        return edited / base


@dataclass(frozen=True, eq=False)
class Negated:
    """Searches along the task vector and along a random vector, and the model at the chosen scale; None at scale 0."""

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
) -> Negated:
    """Negate the task vector of a target, with all other tasks as control. `probes`: score with `base_heads`."""
    span = span_of(arithmetic(experts, {}), arithmetic(experts, {target: -1.0}, seed=seed))
    # Tasks without an expert use the pooling and length of the target's head.
    heads: Mapping[str, Head | Extra] = {task: experts.heads.get(task, experts.heads[target]) for task in encoded.tasks}
    if probes:
        heads = base_heads(span, encoded, heads)
    options: dict[str, Any] = {"target": target, "grid": grid, "keep": keep}
    search = search_negation(span, heads, encoded, title=f"minus {target}", **options)
    random = search_negation(span.random(seed=seed), heads, encoded, title="random vector", **options)
    model = arithmetic(experts, {target: -search.scale}, dtype=dtype, seed=seed) if search.scale else None
    return Negated(search, random, model)


def base_heads(span: Span, encoded: EncodedTasks, readers: Mapping[str, Head | Extra]) -> dict[str, Head]:
    """Fit probes to the train features of the span's origin, with the pooling and length of the `readers`."""
    heads = {}
    for task, reader in readers.items():
        encoded.labels(task, "train")  # refuses a split without labels
        features = encoded.features(span.origin, task, "train", reader=head_of(reader))
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
) -> Negation:
    """Search the line theta_0 - lambda tau; all tasks of `heads` except the target are the control.

    If no scale keeps the control, or none lowers the target's accuracy, the result is scale 0, the base.
    """
    if not 0 < keep <= 1:
        raise RecipeError(f"the share of the control to keep must be in (0, 1], got {keep}")
    if target not in heads or len(heads) < 2:
        raise RecipeError(f"negation needs a head of the target {target!r} and of a control task; give both")
    _check_labels(encoded, heads)
    curve = []
    for scale in scales(grid):
        scores = span.scores((scale,), encoded, "val", heads)
        reached = scores.pop(target).value
        if scale == 0:
            _check_control(encoded, scores)
        point = NegationPoint(scale, reached, fmean(score.value for score in scores.values()))
        curve.append(point)
        text = f"scale {scale:g}: {target} {100 * point.target:.1f}, control {100 * point.control:.1f}"
        encoded.progress.stage(f"{title}: {text}", None)
    spared = [point for point in curve if point.control >= keep * curve[0].control - _ROUNDING]
    best = min(spared, key=lambda point: (point.target, point.scale)).scale
    base, edited = (span.scores((scale,), encoded, "test", heads) for scale in (0.0, best))
    return Negation(target, keep, tuple(curve), best, base, edited)


def _check_labels(encoded: EncodedTasks, tasks: Iterable[str]) -> None:
    """Refuse splits without labels before a search."""
    for task, split in product(tasks, _SEARCHED):
        encoded.labels(task, split)


def _check_control(encoded: EncodedTasks, scores: Mapping[str, Score]) -> None:
    """Refuse a control on which the base is no better than the most frequent class: there is nothing to keep."""
    for task, score in scores.items():
        truth = encoded.labels(task, "val")
        share = int(truth.bincount().max()) / len(truth)
        if score.value <= share:
            raise RecipeError(
                f"the base must predict the control {task!r} better than its most frequent class, got an accuracy of "
                f"{score.value:.1%} against {share:.1%} on validation data; choose another control, or a head that was "
                "fitted to the base's features"
            )


@dataclass(frozen=True)
class Form:
    """Three tasks of an analogy: A is to B as C is to the task of the data."""

    a: str
    b: str
    c: str

    def __str__(self) -> str:
        return f"{self.a}:{self.b}::{self.c}"

    @classmethod
    def parse(cls, text: str) -> Form:
        match = _FORM.fullmatch(text)
        names = [name.strip() for name in match.groups()] if match else [""]
        if not all(names):
            raise RecipeError(f"an analogy must be a:b::c (a is to b as c is to the task of the data), got {text!r}")
        return cls(*names)

    def coefficients(self, scale: float, shift: float) -> dict[str, float]:
        """Return the coefficient of every task vector in scale * tau_C + shift * (tau_B - tau_A)."""
        total = dict.fromkeys((self.a, self.b, self.c), 0.0)  # two of the three may be the same
        for task, coefficient in ((self.c, scale), (self.b, shift), (self.a, -shift)):
            total[task] += coefficient
        return total


@dataclass(frozen=True)
class AnalogyPoint:
    """Accuracy on validation data at one pair of coefficients: `scale` of tau_C, `shift` of tau_B - tau_A."""

    scale: float
    shift: float
    accuracy: float


@dataclass(frozen=True)
class Analogy:
    """Result of a search. Test scores of the base, the expert of C (`auxiliary`), coefficients 1 (`unscaled`), the
    coefficients of `best` (`edited`), and the expert of D if there is one.
    """

    task: str
    curve: tuple[AnalogyPoint, ...]
    best: AnalogyPoint
    base: Score
    auxiliary: Score
    unscaled: Score
    edited: Score
    expert: Score | None


@dataclass(frozen=True, eq=False)
class Analogous:
    """Search of an analogy, and the model at the chosen coefficients; None if both are 0."""

    search: Analogy
    model: Model | None


def solve_analogy(
    experts: Experts,
    form: Form,
    task: str,
    encoded: EncodedTasks,
    *,
    independent: bool = False,
    grid: Sequence[float] = GRID,
    dtype: str = "keep",
    seed: int = 0,
) -> Analogous:
    plane = analogy_plane(experts, form, seed=seed)
    head = experts.heads[form.c]
    search = search_analogy(plane, head, encoded, task=task, grid=grid, independent=independent, title=str(form))
    best, model = search.best, None
    if best.scale or best.shift:
        model = arithmetic(experts, form.coefficients(best.scale, best.shift), dtype=dtype, seed=seed)
    return Analogous(search, model)


def analogy_plane(experts: Experts, form: Form, *, seed: int = 0) -> Span:
    ends = (form.coefficients(scale, shift) for scale, shift in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    return span_of(*(arithmetic(experts, end, seed=seed) for end in ends))


def search_analogy(
    span: Span,
    head: Head | Extra,
    encoded: EncodedTasks,
    *,
    task: str,
    grid: Sequence[float] = GRID,
    independent: bool = False,
    title: str = "analogy",
) -> Analogy:
    """Search the diagonal of the plane of tau_C and tau_B - tau_A, or a square if coefficients are `independent`.

    Ties go to the point nearest to the base; (0, 0), the base, is always tried. `head` is that of C.
    """
    _check_labels(encoded, [task])
    grid, curve = scales(grid), []
    for scale, shift in product(grid, grid) if independent else zip(grid, grid, strict=True):
        score = span.scores((scale, shift), encoded, "val", {task: head})[task]
        point = AnalogyPoint(scale, shift, score.value)
        curve.append(point)
        encoded.progress.stage(f"{title}: scale {scale:g}, shift {shift:g}: {100 * point.accuracy:.1f}", None)
    best = min(curve, key=lambda point: (-point.accuracy, point.scale + point.shift, point.scale))
    shown = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (best.scale, best.shift))
    base, auxiliary, unscaled, edited = (span.scores(pair, encoded, "test", {task: head})[task] for pair in shown)
    expert = encoded.score(encoded.teachers[task], task, "test") if task in encoded.teachers else None
    return Analogy(task, tuple(curve), best, base, auxiliary, unscaled, edited, expert)
