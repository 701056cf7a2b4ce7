"""Diagnose a model: what it lost against its experts, and what can be recovered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.analysis.detail import Detail
from orthomerge.analysis.diagnose import diagnose as compare
from orthomerge.api.load import resolve
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import labelled_tasks
from orthomerge.models.experts import reopen_experts

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.evaluation.records import Record
    from orthomerge.evaluation.scale import ScaleSearch
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


def diagnose(
    model: Model | str | Path,
    data: Mapping[str, Any],
    *,
    experts: Experts | None = None,
    detail: Detail | None = None,
    records: Sequence[Record] = (),
    search: ScaleSearch | None = None,
    commands: Mapping[str, str] | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Say how much of what a merge lost is misalignment and how much is gone; nothing is written.

    `data`: by task, labelled test inputs and a train or val split, whose labels are not needed. `experts`: those that
    the model was made from, which are opened again if they are not given. `detail`: how much to measure. `records`:
    scores of the same model, as witnesses. `search`: scores by scale. `commands`: what the verdict may suggest.
    """
    model, folder = resolve(model)
    tasks = labelled_tasks(data, model.labels, model.family.modality)
    if experts is None:
        experts = reopen_experts(model, folder=folder, tasks=[task for task in model.tasks if task in tasks])
    return compare(
        model,
        experts,
        tasks,
        detail=detail,
        records=records,
        search=search,
        commands=commands,
        how=encoding,
        progress=progress,
    )
