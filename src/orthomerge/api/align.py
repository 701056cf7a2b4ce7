"""Align the heads of a model to its encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.alignment.align import align_model
from orthomerge.alignment.aligners import chosen_aligner
from orthomerge.api.load import resolve
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.tasks import unlabelled_tasks
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import reopen_experts
from orthomerge.models.model import Model

if TYPE_CHECKING:
    from orthomerge.data.task import Split
    from orthomerge.models.experts import Experts


def align(
    model: Model | str | Path,
    data: Mapping[str, Any],
    *,
    aligner: str = "auto",
    options: Mapping[str, Any] | None = None,
    experts: Experts | None = None,
    split: Split = "train",
    limit: int | None = None,
    seed: int = 0,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Fit each task's head to the encoder by what its expert makes of the same inputs; labels are not looked at.

    `data`: inputs by task, a `Task` or what can be read as one; other tasks keep their heads. `experts`: those that the
    model was made from, which are opened again if they are not given. `split`: "test" makes whatever is measured there
    transductive. `limit`: at most so many inputs per task, drawn by `seed`.
    """
    model, folder = resolve(model)
    if split not in ("train", "val", "test"):
        raise RecipeError(f"'split' must be train, val or test, got {split!r}")
    if "alignment" in model.origin.facts:
        by = model.origin.facts["alignment"]["aligner"]
        raise RecipeError(f"this model has been aligned already, by {by!r}; align the merge that it was made from")
    if not model.family.encoder_class:
        raise RecipeError(
            "this model is of a module of your own, which cannot be built here; make the features yourself, "
            "and give them to an aligner of orthomerge.alignment.aligners"
        )
    for task in data:
        model.head(task)
    chosen = chosen_aligner(aligner, options or {}, seed=seed)
    tasks = unlabelled_tasks(data, model.labels, model.family.modality, split=split, limit=limit, seed=seed)
    experts = experts or reopen_experts(model, folder=folder, tasks=tuple(data))
    access = "transductive" if split == "test" else "inductive"
    about = {"aligner": aligner, "seed": seed, "split": split, "limit": limit, "access": access}
    inputs = {name: task[split] for name, task in tasks.items()}
    return align_model(model, experts, inputs, chosen, about, encoding=encoding or Encoding(), progress=progress)
