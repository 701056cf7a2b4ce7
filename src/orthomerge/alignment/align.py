"""New heads for a model from features of the same inputs under its encoder and under its experts' encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orthomerge.alignment.saving import as_saved
from orthomerge.core.errors import IncompatibleError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import schema
from orthomerge.core.version import VERSION
from orthomerge.merging.stream import single_threaded
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import head_of
from orthomerge.models.record import short_hashes
from orthomerge.models.writing import plain, versions

if TYPE_CHECKING:
    from orthomerge.alignment.aligner import Aligner
    from orthomerge.data.task import Examples
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Head
    from orthomerge.models.model import Model


def align_model(
    model: Model,
    experts: Experts,
    inputs: Mapping[str, Examples],
    aligner: Aligner,
    about: Mapping[str, Any],
    *,
    encoding: Encoding,
    progress: Progress = SILENT,
) -> Model:
    """The model with aligned heads for the tasks of `inputs`; others stay as they are.

    `about`: what the manifest says of the alignment beside its results, such as the aligner's name and the seed.
    """
    merged = {}
    for task, examples in inputs.items():  # merged features first, so that the merged encoder is computed once
        progress.stage(f"encoding {task}", None)
        merged[task] = encode(model, examples, task=task, how=encoding)
    heads, facts = dict(model.heads), {}
    for task, examples in inputs.items():
        progress.stage(f"aligning {task} by {about['aligner']}", None)
        own = _own_head(model, experts, task)
        expert = encode(experts.teacher(task), examples, task=task, head=own, how=encoding)
        with single_threaded():  # sums of several threads depend on their number
            alignment = aligner.fit(FeaturePair(merged[task], expert), own)
        heads[task], results = as_saved(task, alignment, head_of(model.heads[task]), merged[task].values)
        facts[task] = {"inputs": len(examples), "data": f"sha256:{examples.digest()}", **results}
    options = plain({option: getattr(aligner, option) for option in schema(type(aligner))})
    about = {"orthomerge": VERSION, **about, "options": options, "tasks": facts, "versions": versions()}
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
