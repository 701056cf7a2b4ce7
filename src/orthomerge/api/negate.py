"""Forget a task: the base minus its task vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from orthomerge.api.arithmetic import arithmetic
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import read_task
from orthomerge.data.task import Task
from orthomerge.data.tasks import labelled_tasks
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.negation import KEEP, Negation, base_heads, search_negation
from orthomerge.evaluation.scale import GRID
from orthomerge.evaluation.span import scales, span_of
from orthomerge.models.encoding import Encoding

if TYPE_CHECKING:
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Extra, Head
    from orthomerge.models.model import Model


Heads = Literal["probe", "expert"]


@dataclass(frozen=True, eq=False)
class Negated:
    """The search along the task vector and, beside it, along a random vector of the same length.

    `model`: the base minus the task vector at the chosen scale; None if that is 0.
    """

    search: Negation
    random: Negation
    model: Model | None


def negate(
    experts: Experts,
    target: str,
    data: Mapping[str, Any],
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
    """Forget the task `target` as far as accuracy on control tasks allows, chosen on validation data.

    `data`: labelled data of target and controls. `controls`: what to keep, all other tasks of `data` if None. `heads`:
    how tasks are scored, by probes fitted on the base's features or by the experts' heads. `keep`: the share of the
    base's control accuracy to keep.
    """
    if heads not in get_args(Heads):
        raise RecipeError(f"unknown heads {heads!r}; {nearest(heads, get_args(Heads))}")
    scales(grid)
    wanted = [target, *(controls if controls is not None else (task for task in data if task != target))]
    for task in wanted:
        if task not in data:
            raise RecipeError(f"there is no data of {task!r}; give --data {task}=PATH")
        if heads == "expert" and task not in experts.tasks:
            raise RecipeError(f"'--heads expert' reads {task!r} by its expert's head; give --expert {task}=PATH")
    sources = {task: data[task] if isinstance(data[task], Task) else read_task(data[task]) for task in wanted}
    labels = {task: experts.heads[task].labels if heads == "expert" else sources[task].labels for task in wanted}
    encoded = EncodedTasks(labelled_tasks(sources, labels, experts.family.modality), how=encoding or Encoding())
    span = span_of(arithmetic(experts, {}), arithmetic(experts, {target: -1.0}, seed=seed))
    # Probes of tasks without an expert read the encoder as the target's head does.
    readers: Mapping[str, Head | Extra] = {task: experts.heads.get(task, experts.heads[target]) for task in wanted}
    if heads == "probe":
        readers = base_heads(span, encoded, readers)
    search, random = (
        search_negation(line, readers, encoded, target=target, grid=grid, keep=keep, title=title, progress=progress)
        for line, title in ((span, f"minus {target}"), (span.random(seed=seed), "random vector"))
    )
    model = arithmetic(experts, {target: -search.scale}, dtype=dtype, seed=seed) if search.scale else None
    return Negated(search, random, model)
