"""Make a model for a task without training data, from an analogy of three others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.tasks import labelled_tasks
from orthomerge.evaluation.analogy import Analogy, Form, coefficients, search_analogy
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.scale import GRID
from orthomerge.evaluation.span import arithmetic, scales, span_of
from orthomerge.models.encoding import Encoding

if TYPE_CHECKING:
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


@dataclass(frozen=True, eq=False)
class Analogous:
    """The search, and the model at the chosen coefficients; None if these are 0."""

    search: Analogy
    model: Model | None


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
    """Make a model for `task` as C + (B - A), scored with the head of C.

    `of`: "a:b::c", a is to b as c is to the task. `data`: its labelled validation and test data. `independent`: a
    coefficient for C and another for B - A. If there is an expert of the task itself, it is scored beside.
    """
    form = Form.parse(of) if isinstance(of, str) else of
    scales(grid)
    if task in (form.a, form.b, form.c):
        raise RecipeError(
            f"the data is of the fourth task, and {task!r} is one of the three of the analogy; give it a new name"
        )
    corners: tuple[dict[str, float], ...] = (
        {},
        coefficients(form, scale=1.0, shift=0.0),
        coefficients(form, scale=0.0, shift=1.0),
    )
    origin, *ends = (arithmetic(experts, corner, seed=seed) for corner in corners)
    head = experts.heads[form.c]
    tasks = labelled_tasks({task: data}, {task: head.labels}, experts.family.modality)
    teachers = {task: experts.teacher(task)} if task in experts.tasks else {}
    encoded = EncodedTasks(tasks, teachers, encoding or Encoding())
    title = of if isinstance(of, str) else f"{form.a}:{form.b}::{form.c}"
    search = search_analogy(
        span_of(origin, *ends),
        head,
        encoded,
        task=task,
        grid=grid,
        independent=independent,
        title=title,
        progress=progress,
    )
    best = search.best
    if best.scale == best.shift == 0:
        return Analogous(search, None)
    chosen = coefficients(form, scale=best.scale, shift=best.shift)
    return Analogous(search, arithmetic(experts, chosen, dtype=dtype, seed=seed))
