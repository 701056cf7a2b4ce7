"""Align the heads of a model to its encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.alignment.align import align_model
from orthomerge.api.saved import resolve
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import sources_of
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts, reopen_experts
from orthomerge.models.model import Model

if TYPE_CHECKING:
    from orthomerge.data.task import Split


def align(
    model: Model | str | Path,
    data: Mapping[str, Any] | str | Path,
    *,
    aligner: str = "auto",
    options: Mapping[str, Any] | None = None,
    experts: Experts | Mapping[str, Any] | None = None,
    base: Any = None,
    split: Split = "train",
    limit: int | None = None,
    seed: int = 0,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Fit each task's head to the encoder from its expert's outputs on the same inputs; labels are not used.

    `data`: inputs by task, or a folder with a file per task; other tasks keep their heads. `experts`: those that the
    model was made from; else they are opened again, where `experts` and `base` say they are now. `split`: "test" makes
    whatever is measured there transductive. `limit`: at most N inputs per task, drawn by `seed`.
    """
    value, folder = resolve(model)
    sources = sources_of(data, value.tasks)
    if not isinstance(experts, Experts):
        named = bool(sources) and (bool(experts) or base is not None)
        moved, tasks = experts or {}, tuple(sources)
        experts = reopen_experts(value, folder=folder, base=base, experts=moved, tasks=tasks) if named else None
    return align_model(
        value,
        sources,
        aligner=aligner,
        options=options,
        experts=experts,
        folder=folder,
        split=split,
        limit=limit,
        seed=seed,
        encoding=encoding,
        progress=progress,
    )
