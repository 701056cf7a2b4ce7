"""Edit models along task vectors: forget a task, or make a model for a task without training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import labelled_tasks, read_task, sources_of
from orthomerge.data.task import Task
from orthomerge.evaluation.editing import KEEP, Analogous, Form, Negated, negate_task, solve_analogy
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.scale import GRID, check_vectors
from orthomerge.models.encoding import Encoding

if TYPE_CHECKING:
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
            raise RecipeError(f"'--heads expert' reads {task!r} by its expert's head; give its expert too")
    sources = {task: data[task] if isinstance(data[task], Task) else read_task(data[task]) for task in tested}
    labels = {task: experts.heads[task].labels if heads == "expert" else sources[task].labels for task in tested}
    tasks = labelled_tasks(sources, labels, experts.family.modality)
    encoded = EncodedTasks(tasks, how=encoding or Encoding(), progress=progress)
    probes = heads == "probe"
    return negate_task(experts, target, encoded, probes=probes, grid=grid, keep=keep, dtype=dtype, seed=seed)


def analogy(
    experts: Experts,
    of: str | Form,
    task: str,
    data: Any,
    *,
    independent: bool = False,
    grid: Sequence[float] = GRID,
    dtype: str = "keep",
    seed: int = 0,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Analogous:
    """Make a model for `task` as C + (B - A), scored with the head of C; an expert of the task is scored beside it.

    `of`: "a:b::c", a is to b as c is to the task. `data`: its labelled validation and test data. `independent`: one
    coefficient for C and one for B - A.
    """
    form = Form.parse(of) if isinstance(of, str) else of
    if task in (form.a, form.b, form.c):
        raise RecipeError(
            f"the data is of the fourth task, and {task!r} is one of the three of the analogy; give it a new name"
        )
    check_vectors(experts, (form.a, form.b, form.c))
    tasks = labelled_tasks({task: data}, {task: experts.heads[form.c].labels}, experts.family.modality)
    teachers = {task: experts.teacher(task)} if task in experts.tasks else {}
    encoded = EncodedTasks(tasks, teachers, encoding or Encoding(), progress=progress)
    return solve_analogy(experts, form, task, encoded, independent=independent, grid=grid, dtype=dtype, seed=seed)
