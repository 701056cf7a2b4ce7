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
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.evaluation.metrics import Score, counted, predictions
from orthomerge.evaluation.scale import GRID
from orthomerge.evaluation.span import scales, score_at
from orthomerge.models.heads import head_of

if TYPE_CHECKING:
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.evaluation.span import Span
    from orthomerge.models.heads import Extra, Head


@dataclass(frozen=True)
class Form:
    """A is to B as C is to whatever is measured."""

    a: str
    b: str
    c: str

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
    title: str = "",
    progress: Progress = SILENT,
) -> Analogy:
    """Walk the plane of tau_C and tau_B - tau_A along its diagonal, or over a square if the coefficients are
    `independent`.

    Of equal points the nearest to the base is taken; (0, 0), the base, is always among them. `head` is that of C. If
    the task has a teacher, it is scored as the expert.
    """
    numbers = scales(grid)
    encoded.labels(task, "val")
    truth = encoded.labels(task, "test")
    pairs = [(scale, shift) for scale in numbers for shift in (numbers if independent else (scale,))]
    curve = []
    for scale, shift in pairs:
        point = Point(scale, shift, score_at(span, (scale, shift), head, encoded, task, "val").value)
        curve.append(point)
        text = f"scale {scale:g}, shift {shift:g}: {100 * point.accuracy:.1f}"
        progress.stage(f"{title}: {text}" if title else text, None)
    best = min(curve, key=lambda point: (-point.accuracy, point.scale + point.shift, point.scale))
    base, auxiliary, unscaled, edited = (
        score_at(span, pair, head, encoded, task, "test")
        for pair in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (best.scale, best.shift))
    )
    expert = None
    if task in encoded.teachers:
        kind = head_of(encoded.teachers[task].head(task)).kind
        expert = counted(predictions(encoded.teacher_logits(task, "test"), kind), truth)
    return Analogy(task, tuple(curve), best, base, auxiliary, unscaled, edited, expert)
