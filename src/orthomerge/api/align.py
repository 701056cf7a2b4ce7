"""Align the heads of a model to its encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.alignment.aligners import chosen_aligner
from orthomerge.alignment.saving import as_saved
from orthomerge.api.load import resolve
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import schema
from orthomerge.core.version import VERSION
from orthomerge.data.tasks import unlabelled_tasks
from orthomerge.merging.stream import single_threaded
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import head_of
from orthomerge.models.model import Model
from orthomerge.models.reopening import reopen_experts, short_hashes
from orthomerge.models.writing import plain, versions

if TYPE_CHECKING:
    from orthomerge.alignment.aligner import Aligner
    from orthomerge.data.task import Examples, Split, Task
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Head


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
    _check(model, data, split)
    how = encoding or Encoding()
    chosen = chosen_aligner(aligner, options or {}, seed=seed)
    tasks = unlabelled_tasks(data, model.labels, model.family.modality, split=split, limit=limit, seed=seed)
    experts = experts or reopen_experts(model, folder=folder, tasks=tuple(data))
    merged = {}
    for name, task in tasks.items():  # merged features first, so that the merged encoder is computed once
        progress.stage(f"encoding {name}", None)
        merged[name] = encode(model, task[split], task=name, how=how)
    heads, facts = dict(model.heads), {}
    for name, task in tasks.items():
        progress.stage(f"aligning {name} by {aligner}", None)
        own = _own_head(model, experts, name)
        expert = encode(experts.teacher(name), task[split], task=name, head=own, how=how)
        with single_threaded():  # what is summed up by several threads depends on their number
            alignment = chosen.fit(FeaturePair(merged[name], expert), own)
        heads[name], facts[name] = as_saved(name, alignment, head_of(model.heads[name]), merged[name].values)
    about = _about(aligner, chosen, tasks, facts, split=split, limit=limit, seed=seed)
    notes = [*model.origin.facts.get("notes", ()), *_notes(model, facts)]
    kept = {name: value for name, value in model.origin.facts.items() if name != "evaluation"}  # it was of other heads
    seen = {name: short_hashes(task[split]) for name, task in tasks.items()}
    origin = replace(
        model.origin,
        facts={**kept, "notes": notes, "alignment": about},
        inputs={**model.origin.inputs, **seen},
    )
    return model.with_heads(heads, origin)


def _check(model: Model, data: Mapping[str, Any], split: str) -> None:
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


def _about(
    name: str,
    aligner: Aligner,
    tasks: Mapping[str, Task],
    facts: Mapping[str, Mapping[str, Any]],
    *,
    split: Split,
    limit: int | None,
    seed: int,
) -> dict[str, Any]:
    """What the manifest says of the alignment."""
    inputs: dict[str, Examples] = {task: each[split] for task, each in tasks.items()}
    return {
        "orthomerge": VERSION,
        "aligner": name,
        "options": plain({option: getattr(aligner, option) for option in schema(type(aligner))}),
        "seed": seed,
        "split": split,
        "limit": limit,
        "access": "transductive" if split == "test" else "inductive",
        "tasks": {
            task: {"inputs": len(inputs[task]), "data": f"sha256:{inputs[task].digest()}", **facts[task]}
            for task in tasks
        },
        "versions": versions(),
    }


def _notes(model: Model, facts: Mapping[str, Any]) -> list[str]:
    left = [task for task in model.tasks if task not in facts]
    return [f"no data of {task!r} was given to align it with; its head is as it was merged" for task in left]
