"""Choosing lambda: a grid of scales, each merged and scored on validation inputs.

With labels the criterion is mean normalised accuracy (Ortiz-Jimenez et al. 2023); without, the mean agreement with
the experts' own predictions. Test inputs play no part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from orthomerge.errors import RecipeError
from orthomerge.evaluation.evaluate import Bench
from orthomerge.evaluation.metrics import predict, predictions
from orthomerge.evaluation.span import ORIGIN, span_of
from orthomerge.heads import Head
from orthomerge.merged import Merged
from orthomerge.merging.methods import find_method, method_maker
from orthomerge.recipe import Recipe
from orthomerge.strict import schema

__all__ = ["GRID", "Criterion", "ScaleSearch", "search_scale"]

Criterion = Literal["accuracy", "agreement"]
GRID = tuple(round(0.05 * step, 2) for step in range(1, 21))


@dataclass(frozen=True)
class ScaleSearch:
    """The curve: each scale with its score in percent, by task and in the mean; `best` has the highest mean."""

    criterion: Criterion
    curve: dict[float, dict[str, float]]

    @property
    def means(self) -> dict[float, float]:
        return {scale: sum(scores.values()) / len(scores) for scale, scores in self.curve.items()}

    @property
    def best(self) -> float:
        return max(self.means, key=lambda scale: (self.means[scale], -scale))

    def plot(self, width: int = 40) -> str:
        """The curve as text."""
        top = max(self.means.values())
        rows = []
        for scale, value in self.means.items():
            bar = "#" * max(0, round(width * value / max(top, 1e-9)))
            rows.append(f"{scale:5.2f} {value:5.1f} {bar}{' <' if scale == self.best else ''}")
        return "\n".join(rows)


def search_scale(
    recipe: Recipe,
    bench: Bench,
    *,
    grid: Sequence[float] = GRID,
    criterion: Criterion = "accuracy",
    say: Callable[[str], None] = lambda text: None,
) -> ScaleSearch:
    """Score every scale of the grid on the val splits of the bench.

    Every method with a `scale` multiplies its merged vector by it, so two merges (at 0 and 1) give all of them: the
    weights between and beyond lie on the line through both.
    """
    if not grid:
        raise RecipeError("a search over scales needs at least one scale; give a grid")
    if "scale" not in schema(method_maker(find_method(recipe.method))):
        raise RecipeError(f"{recipe.method!r} has no 'scale' to search; merge it as it is")
    start, end = (replace(recipe, parameters={**recipe.parameters, "scale": scale}) for scale in (0.0, 1.0))
    with tempfile.TemporaryDirectory(prefix="orthomerge-scale-") as name:
        span = span_of(Path(name), start, end)
        heads = {task: bench.head(Path(name) / ORIGIN, task) for task in bench.tasks}
    curve: dict[float, dict[str, float]] = {}
    for scale in map(float, grid):
        model = span.at(scale)
        curve[scale] = {task: _score(bench, model, heads[task], task, criterion) for task in bench.tasks}
        say(f"scale {scale:g}: {sum(curve[scale].values()) / len(bench.tasks):.1f}")
    return ScaleSearch(criterion, curve)


def _score(bench: Bench, model: Merged, head: Head, task: str, criterion: Criterion) -> float:
    """Accuracy normalised by the expert's, or agreement with the expert, on the val split; in percent."""
    features = bench.encode(model, task, bench.tasks[task]["val"])
    predicted = predict(head, features.values)
    expert = predictions(bench.teacher(task, "val"))
    if criterion == "agreement":
        return 100 * float((predicted == expert).float().mean())
    if features.labels is None:
        raise RecipeError(f"the val split of {task!r} has no labels; choose the scale by 'agreement' instead")
    right = float((predicted == features.labels).float().mean())
    return 100 * right / max(float((expert == features.labels).float().mean()), 1e-9)
