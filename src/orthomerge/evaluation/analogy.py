"""Task analogies, "A is to B as C is to D": theta_0 + lambda tau_C + mu (tau_B - tau_A), for a D without training data.

Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089, Section 5: the coefficients are chosen on
validation data of D; the result stands between the pre-trained model and fine-tuning on C on one side, and fine-tuning
on D itself on the other. One coefficient for the whole sum, mu = lambda, or (their sentiment experiments) two that are
independent.

D is read by the head of C: an analogy says nothing about labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orthomerge.errors import RecipeError
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.metrics import Score, counted, predictions
from orthomerge.evaluation.scale import GRID
from orthomerge.evaluation.span import Span, arithmetic, labelled, scales, score, span_of
from orthomerge.heads import Classifier
from orthomerge.recipe import Recipe

__all__ = ["Analogy", "Form", "Point", "analogy_span", "combined", "search_analogy"]


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
    """What a search found, on test data but for the `curve`.

    `auxiliary`: fine-tuned on C alone. `unscaled`: both coefficients 1, for which nothing of D was looked at. `edited`:
    those of `best`. `expert`: fine-tuned on D, where the bench has it.
    """

    task: str
    curve: tuple[Point, ...]
    best: Point
    base: Score
    auxiliary: Score
    unscaled: Score
    edited: Score
    expert: Score | None


def combined(recipe: Recipe, form: Form, *, scale: float, shift: float) -> Recipe:
    """The recipe of theta_0 + scale * tau_C + shift * (tau_B - tau_A); other experts only give their heads."""
    total = dict.fromkeys((form.a, form.b, form.c), 0.0)  # two of the three may be one
    for task, coefficient in ((form.c, scale), (form.b, shift), (form.a, -shift)):
        total[task] += coefficient
    return arithmetic(recipe, total)


def analogy_span(recipe: Recipe, form: Form, folder: Path) -> Span:
    """The plane of tau_C and tau_B - tau_A; the merges that it is made of are left in `folder`."""
    ends = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    return span_of(folder, *(combined(recipe, form, scale=scale, shift=shift) for scale, shift in ends))


def search_analogy(
    span: Span,
    bench: Bench,
    head: Classifier,
    *,
    task: str,
    grid: Sequence[float] = GRID,
    independent: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Analogy:
    """Walk the plane of an analogy along its diagonal, or over a square where the coefficients are `independent`.

    Of equal points the nearest to the base is taken; (0, 0), the base, is always among them. `head` is that of C.
    """
    numbers = scales(grid)
    labelled(bench, task, "val")
    _, truth = labelled(bench, task, "test")
    pairs = [(scale, shift) for scale in numbers for shift in (numbers if independent else (scale,))]
    curve = []
    for scale, shift in pairs:
        curve.append(Point(scale, shift, score(bench, span.at(scale, shift), head, task, "val").value))
        say(f"scale {scale:g}, shift {shift:g}: {100 * curve[-1].accuracy:.1f}")
    best = min(curve, key=lambda point: (-point.accuracy, point.scale + point.shift, point.scale))
    base, auxiliary, unscaled, edited = (
        score(bench, span.at(*pair), head, task, "test")
        for pair in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (best.scale, best.shift))
    )
    expert = counted(predictions(bench.teacher(task, "test")), truth) if task in bench.teachers else None
    return Analogy(task, tuple(curve), best, base, auxiliary, unscaled, edited, expert)
