"""Choosing lambda: the points of a grid of scales, scored on validation inputs.

With labels the criterion is mean normalised accuracy (Ortiz-Jimenez et al. 2023); without, the mean agreement with
the experts' own predictions. Test inputs play no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.rows import maker_of
from orthomerge.core.schema import schema
from orthomerge.data.tasks import labelled_tasks
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import predict
from orthomerge.evaluation.span import Span, span_of
from orthomerge.merging.merge import merge_opened
from orthomerge.merging.methods import find_method
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.heads import Extra, Head, head_kind, head_of

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
    experts: Experts,
    method: str,
    data: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    grid: Sequence[float] = GRID,
    criterion: Criterion | Literal["auto"] = "auto",
    seed: int = 0,
    device: str = "cpu",
    vector: str | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> ScaleSearch:
    """Score the merges at every scale of a grid on the validation inputs of `data`; `.best` is the scale to take.

    `criterion`: accuracy, normalised by the experts', or agreement with the experts, which needs no labels; "auto" is
    accuracy if all validation inputs have labels. Test inputs are not looked at. Every method with a `scale` multiplies
    its merged vector by it, so all merges lie on the line through those at 0 and 1.
    """
    if not grid:
        raise RecipeError("a search over scales needs at least one scale; give a grid")
    if "scale" not in schema(maker_of(find_method(method))):
        raise RecipeError(f"{method!r} has no 'scale' to search; merge it as it is")
    labels = {task: head.labels for task, head in experts.heads.items()}
    tasks = labelled_tasks(data, labels, experts.family.modality)
    if criterion == "auto":
        labelled = all(task["val"].labels is not None for task in tasks.values())
        criterion = "accuracy" if labelled else "agreement"
    how: dict[str, Any] = {"dtype": "float32", "seed": seed, "device": device, "vector": vector}
    ends = [merge_opened(experts, method, {**(options or {}), "scale": scale}, **how) for scale in (0.0, 1.0)]
    teachers = {task: experts.teacher(task) for task in tasks}
    span, encoded = span_of(*ends), EncodedTasks(tasks, teachers, encoding or Encoding())
    curve: dict[float, dict[str, float]] = {}
    for scale in map(float, grid):
        curve[scale] = {task: _score(span, scale, experts.heads[task], encoded, task, criterion) for task in tasks}
        progress.stage(f"scale {scale:g}: {sum(curve[scale].values()) / len(tasks):.1f}", None)
    return ScaleSearch(criterion, curve)


def _score(
    span: Span, scale: float, head: Head | Extra, encoded: EncodedTasks, task: str, criterion: Criterion
) -> float:
    """Accuracy normalised by the expert's, or agreement with the expert, on the val split; in percent."""
    kind, features = head_of(head).kind, span.features((scale,), encoded, task, "val", head)
    predicted = predict(head, features.values, kind)
    expert = encoded.predictions(encoded.teacher(task), task, "val")
    if criterion == "agreement":
        return 100 * float((predicted == expert).float().mean())
    if features.labels is None:
        raise RecipeError(f"the val split of {task!r} has no labels; choose the scale by 'agreement' instead")
    right, own = (head_kind(kind).right(chosen, features.labels).float().mean() for chosen in (predicted, expert))
    return 100 * float(right) / max(float(own), 1e-9)
