"""The aligned head of one task: from the sums of all parts, added in the order of the inputs, or from the features."""

from __future__ import annotations

from pathlib import Path

from orthomerge.aligned import Fitted, save_fitted
from orthomerge.checkpoints.publish import write_json
from orthomerge.classifiers import load_head
from orthomerge.manifest import read_manifest
from orthomerge.running.jobs.context import MODEL, Context
from orthomerge.running.jobs.kinds.statistics import aligning, read_sums

__all__ = ["ABOUT", "HEAD", "solve"]

ABOUT, HEAD = "about.json", "head"


def solve(context: Context, folder: Path) -> None:
    """Fit the head, save it, and tell what was found on the way."""
    task: str = context.job.spec["task"]
    run, (expert,) = aligning(context, task), context.needed("expert")
    head = run.head(task, expert / MODEL)
    parts = [read_sums(place, task) for place in context.needed("statistics")]
    if parts:
        total, sample = parts[0]
        for sums, _ in parts[1:]:
            total = total + sums
        made = run.solve(total, head)
    else:
        made, sample = run.in_memory(task, expert / MODEL, head)
    told = read_manifest(expert / MODEL)["inputs"]["experts"][task]
    fitted = Fitted(task, made, load_head(context.places.merged / "heads" / task), sample, told)
    write_json(folder / ABOUT, save_fitted(folder / HEAD, fitted))
