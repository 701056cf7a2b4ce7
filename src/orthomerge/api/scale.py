"""Choose the scale of a merge on validation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.rows import maker_of
from orthomerge.core.schema import schema
from orthomerge.data.tasks import labelled_tasks
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.scale import GRID, Criterion, ScaleSearch
from orthomerge.evaluation.scale import search_scale as search
from orthomerge.evaluation.span import span_of
from orthomerge.merging.merge import merge_opened
from orthomerge.merging.methods import find_method
from orthomerge.models.encoding import Encoding

if TYPE_CHECKING:
    from orthomerge.models.experts import Experts


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
    accuracy if all validation inputs have labels. Test inputs are not looked at.
    """
    if "scale" not in schema(maker_of(find_method(method))):
        raise RecipeError(f"{method!r} has no 'scale' to search; merge it as it is")
    labels = {task: head.labels for task, head in experts.heads.items()}
    tasks = labelled_tasks(data, labels, experts.family.modality)
    if criterion == "auto":
        labelled = all(task["val"].labels is not None for task in tasks.values())
        criterion = "accuracy" if labelled else "agreement"
    origin, end = (
        merge_opened(
            experts,
            method,
            {**(options or {}), "scale": scale},
            dtype="float32",
            seed=seed,
            device=device,
            vector=vector,
        )
        for scale in (0.0, 1.0)
    )
    teachers = {task: experts.teacher(task) for task in tasks}
    encoded = EncodedTasks(tasks, teachers, encoding or Encoding())
    return search(span_of(origin, end), experts.heads, encoded, grid=grid, criterion=criterion, progress=progress)
