"""New heads for a model from features of the same inputs under its encoder and under its experts' encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.alignment.aligners import chosen_aligner
from orthomerge.alignment.saving import as_saved
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import schema
from orthomerge.core.threads import fixed_threads
from orthomerge.core.version import VERSION
from orthomerge.data.reading import unlabelled_tasks
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.experts import reopen_experts
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import head_of
from orthomerge.models.manifest import short_hashes
from orthomerge.models.writing import plain, versions

if TYPE_CHECKING:
    from orthomerge.data.task import Split
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Head
    from orthomerge.models.model import Model


def align_model(
    model: Model,
    data: Mapping[str, Any],
    *,
    aligner: str = "auto",
    options: Mapping[str, Any] | None = None,
    experts: Experts | None = None,
    folder: Path | None = None,
    split: Split = "train",
    limit: int | None = None,
    seed: int = 0,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Fit each task's head to the encoder by what its expert makes of the same inputs; labels are not looked at.

    `data`: inputs by task, a `Task` or what can be read as one; other tasks keep their heads. `experts`: those that the
    model was made from; None opens them again as the model in `folder` says. `split`: "test" makes whatever is measured
    there transductive. `limit`: at most N inputs per task, drawn by `seed`.
    """
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
    inputs, how = {name: task[split] for name, task in tasks.items()}, encoding or Encoding()
    merged = {}
    for task, examples in inputs.items():  # merged features first, so that the merged encoder is computed once
        progress.stage(f"encoding {task}", None)
        merged[task] = encode(model, examples, task=task, how=how)
    heads, facts = dict(model.heads), {}
    for task, examples in inputs.items():
        progress.stage(f"aligning {task} by {aligner}", None)
        own = _own_head(model, experts, task)
        expert = encode(experts.teacher(task), examples, task=task, head=own, how=how)
        with fixed_threads(1):  # sums of several threads depend on their number
            alignment = chosen.fit(FeaturePair(merged[task], expert), own)
        heads[task], results = as_saved(task, alignment, head_of(model.heads[task]), merged[task].values)
        facts[task] = {"inputs": len(examples), "data": f"sha256:{examples.digest()}", **results}
    access = "transductive" if split == "test" else "inductive"
    about = {
        "orthomerge": VERSION,
        "aligner": aligner,
        "seed": seed,
        "split": split,
        "limit": limit,
        "access": access,
        "options": plain({option: getattr(chosen, option) for option in schema(type(chosen))}),
        "tasks": facts,
        "versions": versions(),
    }
    kept = {name: value for name, value in model.origin.facts.items() if name != "evaluation"}  # of the old heads
    notes = [
        f"no data of {task!r} was given to align it with; its head is as it was merged"
        for task in model.tasks
        if task not in inputs
    ]
    origin = replace(
        model.origin,
        facts={**kept, "notes": [*kept.get("notes", ()), *notes], "alignment": about},
        inputs={**model.origin.inputs, **{task: short_hashes(examples) for task, examples in inputs.items()}},
    )
    return model.with_heads(heads, origin)


def _own_head(model: Model, experts: Experts, task: str) -> Head:
    """The expert's own head, its rows named as those of the model."""
    head, here = experts.heads[task], head_of(model.heads[task])
    numbered = tuple(f"LABEL_{number}" for number in range(len(head.labels)))
    if head.labels not in (here.labels, numbered) or len(head.labels) != len(here.labels):
        raise IncompatibleError(
            f"the expert of {task!r} has other labels than the model, or another order; "
            "give the expert that was merged, with the same 'labels'"
        )
    return replace(head, labels=here.labels)
