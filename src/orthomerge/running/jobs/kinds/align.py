"""The merge with its heads aligned: the encoder's very files by hard links, and the heads that were solved for."""

from __future__ import annotations

import json
from pathlib import Path

from orthomerge.output import link_files
from orthomerge.running.jobs.context import MODEL, Context
from orthomerge.running.jobs.kinds.solve import ABOUT, HEAD, aligning

__all__ = ["align"]


def align(context: Context, folder: Path) -> None:
    """Fill a folder as `orthomerge align` does."""
    tasks: list[str] = context.job.spec["tasks"]
    run, model = aligning(context, *tasks), folder / MODEL
    link_files(run.source, model, run.kept)
    found = {}
    for task, place in zip(tasks, context.needed("solve"), strict=True):
        found[task] = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        link_files(place / HEAD, model / "heads" / task, sorted(path.name for path in (place / HEAD).iterdir()))
    run.complete(model, found, run.kept)
