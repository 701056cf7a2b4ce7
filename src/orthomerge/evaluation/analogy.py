"""Task analogies, "A is to B as C is to D": theta_0 + lambda tau_C + mu (tau_B - tau_A), for a D without training data.

Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089, Section 5: the coefficients are chosen on
validation data of D; the result stands between the pre-trained model and fine-tuning on C on one side, and fine-tuning
on D itself on the other. One coefficient for the whole sum, mu = lambda, or (their sentiment experiments) two that are
independent.

D is read by the head of C: an analogy says nothing about labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.evaluation.metrics import Score, counted, predictions
from orthomerge.evaluation.scale import GRID
from orthomerge.evaluation.span import arithmetic, scales, span_of
from orthomerge.models.heads import head_of

if TYPE_CHECKING:
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.evaluation.span import Span
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Extra, Head
    from orthomerge.models.model import Model


@dataclass(frozen=True)
class Form:
    """A is to B as C is to whatever is measured."""

    a: str
    b: str
    c: str

    def __str__(self) -> str:
        return f"{self.a}:{self.b}::{self.c}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """From `a:b::c`."""
        left, middle, c = text.partition("::")
        a, colon, b = left.partition(":")
        names = [name.strip() for name in (a, b, c)]
        if not middle or not colon or not all(names) or any(":" in name for name in names):
            raise RecipeError(f"an analogy is written a:b::c (a is to b as c is to the task of the data), got {text!r}")
        return cls(*names)


@dataclass(frozen=True)
class Point:
    """The accuracy on validation data at one pair of coefficients: `scale` of tau_C, `shift` of tau_B - tau_A."""

    scale: float
    shift: float
    accuracy: float


@dataclass(frozen=True)
class Analogy:
    """Result of a search, on test data but for the `curve`.

    `auxiliary`: fine-tuned on C alone. `unscaled`: both coefficients 1, for which nothing of D was looked at. `edited`:
    those of `best`. `expert`: fine-tuned on D, if there is such an expert.
    """

    task: str
    curve: tuple[Point, ...]
    best: Point
    base: Score
    auxiliary: Score
    unscaled: Score
    edited: Score
    expert: Score | None


@dataclass(frozen=True, eq=False)
class Analogous:
    """The search, and the model at the chosen coefficients; None if these are 0."""

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
    progress: Progress = SILENT,
) -> Analogous:
    """Make a model for a task from the analogy of three experts."""
    corners = (coefficients(form, scale=scale, shift=shift) for scale, shift in ((1.0, 0.0), (0.0, 1.0)))
    origin, *ends = (arithmetic(experts, corner, seed=seed) for corner in ({}, *corners))
    search = search_analogy(
        span_of(origin, *ends),
        experts.heads[form.c],
        encoded,
        task=task,
        grid=grid,
        independent=independent,
        title=str(form),
        progress=progress,
    )
    best = search.best
    if best.scale == best.shift == 0:
        return Analogous(search, None)
    chosen = coefficients(form, scale=best.scale, shift=best.shift)
    return Analogous(search, arithmetic(experts, chosen, dtype=dtype, seed=seed))


def coefficients(form: Form, *, scale: float, shift: float) -> dict[str, float]:
    """The coefficient of every task vector in scale * tau_C + shift * (tau_B - tau_A)."""
    total = dict.fromkeys((form.a, form.b, form.c), 0.0)  # two of the three may be one
    for task, coefficient in ((form.c, scale), (form.b, shift), (form.a, -shift)):
        total[task] += coefficient
    return total


def search_analogy(
    span: Span,
    head: Head | Extra,
    encoded: EncodedTasks,
    *,
    task: str,
    grid: Sequence[float] = GRID,
    independent: bool = False,
    title: str = "analogy",
    progress: Progress = SILENT,
) -> Analogy:
    """Walk the plane of tau_C and tau_B - tau_A along its diagonal, or over a square if the coefficients are
    `independent`.

    Of equal points the nearest to the base is taken; (0, 0), the base, is always among them. `head` is that of C. If
    the task has a teacher, it is scored as the expert.
    """
    grid = scales(grid)
    for split in ("val", "test"):  # both before any work
        encoded.labels(task, split)
    curve = []
    for scale, shift in product(grid, grid) if independent else zip(grid, grid, strict=True):
        point = Point(scale, shift, span.score((scale, shift), encoded, task, "val", head).value)
        curve.append(point)
        progress.stage(f"{title}: scale {scale:g}, shift {shift:g}: {100 * point.accuracy:.1f}", None)
    best = min(curve, key=lambda point: (-point.accuracy, point.scale + point.shift, point.scale))
    base, auxiliary, unscaled, edited = (
        span.score(pair, encoded, task, "test", head)
        for pair in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (best.scale, best.shift))
    )
    expert = None
    if task in encoded.teachers:
        kind = head_of(encoded.teachers[task].head(task)).kind
        expert = counted(predictions(encoded.teacher_logits(task, "test"), kind), encoded.labels(task, "test"), kind)
    return Analogy(task, tuple(curve), best, base, auxiliary, unscaled, edited, expert)
