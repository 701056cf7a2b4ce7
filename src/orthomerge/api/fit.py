"""Fit a merge to unlabelled inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.core.device import device_of
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.threads import fixed_threads
from orthomerge.data.tasks import unlabelled_tasks
from orthomerge.fitting.fit import fit_model
from orthomerge.merging.merge import check_merge, chosen_method, origin_of
from orthomerge.models.encoding import Encoding

if TYPE_CHECKING:
    from orthomerge.data.task import Split
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


def fit(
    experts: Experts,
    method: Any,
    data: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    dtype: str = "keep",
    seed: int = 0,
    device: str = "auto",
    split: Split = "train",
    limit: int | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    state: Path | None = None,
    save_every: float | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Fit a merge to unlabelled inputs of every expert and return it as a model; nothing is written but `state`.

    `method`: a fitted method's name with its `options`, or an object. `data`: inputs by task, a `Task` or what can be
    read as one. `split`: "test" makes whatever is measured there transductive. `limit`: at most so many inputs per
    task, drawn by `seed`. `precision`: of training, bfloat16 or float32; auto is bfloat16 on a GPU. `state`: a folder
    from which a killed run of the same fit continues; it is written every `save_every` seconds and never removed here.
    """
    name, chosen, used = chosen_method(experts, method, options or {}, seed=seed)
    check_merge(experts, name)
    if not hasattr(chosen, "fit"):
        raise RecipeError(f"{name!r} looks at no inputs; leave them out, or use a fitted method such as realign")
    missing = [task for task in experts.tasks if task not in data]
    if missing:
        task = missing[0]
        raise RecipeError(f"there are no inputs of {task!r}, and a fit needs those of all; give --data {task}=PATH")
    labels = {task: head.labels for task, head in experts.heads.items()}
    tasks = unlabelled_tasks(data, labels, experts.family.modality, split=split, limit=limit, seed=seed)
    place = device_of(device)
    with fixed_threads():
        return fit_model(
            experts,
            chosen,
            {task: tasks[task][split].unlabelled() for task in experts.tasks},
            origin_of(experts, name, used, seed=seed),
            split=split,
            device=place,
            seed=seed,
            half=precision == "bfloat16" or (precision == "auto" and place.type == "cuda"),
            dtype=dtype,
            state=state,
            save_every=save_every,
            encoding=encoding or Encoding(device=device),
            progress=progress,
        )
