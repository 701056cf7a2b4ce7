"""The aligned head of one task."""

from __future__ import annotations

from pathlib import Path

from orthomerge.aligned import Fitted, save_fitted
from orthomerge.aligning import Aligning
from orthomerge.checkpoints.publish import write_json
from orthomerge.classifiers import load_head
from orthomerge.errors import RecipeError
from orthomerge.manifest import read_manifest
from orthomerge.running.jobs.context import MODEL, Context

__all__ = ["ABOUT", "HEAD", "aligning", "solve"]

ABOUT, HEAD = "about.json", "head"


def solve(context: Context, folder: Path) -> None:
    """Fit the head, save it, and tell what was found on the way."""
    task: str = context.job.spec["task"]
    run, (expert,) = aligning(context, task), context.needed("expert")
    made, sample = run.in_memory(task, expert / MODEL, run.head(task, expert / MODEL))
    told = read_manifest(expert / MODEL)["inputs"]["experts"][task]
    fitted = Fitted(task, made, load_head(context.places.merged / "heads" / task), sample, told)
    write_json(folder / ABOUT, save_fitted(folder / HEAD, fitted))


def aligning(context: Context, *tasks: str) -> Aligning:
    """The alignment of the merge that jobs made, for some tasks."""
    block = context.recipe.align
    if block is None:
        raise RecipeError("the recipe has no block 'align', but the plan aligns; plan again")
    data = {task: block.data[task] for task in tasks}
    context.check_data(data.values())
    return Aligning(context.places.merged, context.recipe, block, data)
