"""Align the heads of a model to its encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.alignment.align import align_model
from orthomerge.api.load import resolve
from orthomerge.core.progress import SILENT, Progress
from orthomerge.models.encoding import Encoding
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
    transductive. `limit`: at most N inputs per task, drawn by `seed`.
    """
    model, folder = resolve(model)
    return align_model(
        model,
        data,
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
