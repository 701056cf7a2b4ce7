from collections.abc import Sequence
from typing import Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import labelled_tasks
from orthomerge.evaluation.editing import Analogous, Form, solve_analogy
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.scale import GRID, check_vectors
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts


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

    `of`: "a:b::c", a is to b as c is to the task. `data`: its labelled validation and test data. `independent`: search
    separate coefficients for C and B - A.
    """
    form = Form.parse(of) if isinstance(of, str) else of
    if task in (form.a, form.b, form.c):
        raise RecipeError(
            f"the data must be of a fourth task, but {task!r} is one of the three of the analogy; give it a new name"
        )
    check_vectors(experts, (form.a, form.b, form.c))
    tasks = labelled_tasks({task: data}, {task: experts.heads[form.c].labels}, experts.family.modality)
    teachers = {task: experts.teacher(task)} if task in experts.tasks else {}
    encoded = EncodedTasks(tasks, teachers, encoding or Encoding(), progress=progress)
    return solve_analogy(experts, form, task, encoded, independent=independent, grid=grid, dtype=dtype, seed=seed)
