from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import labelled_tasks, read_task, sources_of
from orthomerge.data.task import Task
from orthomerge.evaluation.editing import KEEP, Negated, negate_task
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.scale import GRID
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts

Heads = Literal["probe", "expert"]


def negate(
    experts: Experts,
    target: str,
    data: Mapping[str, Any] | str | Path,
    *,
    controls: Sequence[str] | None = None,
    heads: Heads = "probe",
    keep: float = KEEP,
    grid: Sequence[float] = GRID,
    dtype: str = "keep",
    seed: int = 0,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Negated:
    """Forget the task `target`: subtract its task vector as far as the accuracy on control tasks allows.

    `data`: labelled data of target and controls. `controls`: tasks to keep, all others of `data` if None. `heads`:
    score with probes fitted on the base's features or with the experts' heads. `keep`: share of the base's control
    accuracy to keep.
    """
    if heads not in get_args(Heads):
        raise RecipeError(f"unknown heads {heads!r}; {nearest(heads, get_args(Heads))}")
    data = sources_of(data, [target, *(controls or experts.tasks)])
    tested = [target, *(controls if controls is not None else (task for task in data if task != target))]
    for task in tested:
        if task not in data:
            raise RecipeError(f"there is no data of {task!r}; give --data {task}=PATH")
        if heads == "expert" and task not in experts.tasks:
            raise RecipeError(f"'--heads expert' scores {task!r} with its expert's head; give its expert too")
    sources = {task: data[task] if isinstance(data[task], Task) else read_task(data[task]) for task in tested}
    labels = {task: experts.heads[task].labels if heads == "expert" else sources[task].labels for task in tested}
    tasks = labelled_tasks(sources, labels, experts.family.modality)
    encoded = EncodedTasks(tasks, how=encoding or Encoding(), progress=progress)
    return negate_task(experts, target, encoded, probes=heads == "probe", grid=grid, keep=keep, dtype=dtype, seed=seed)
