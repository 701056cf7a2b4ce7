"""The models of a sweep: its merges, the experts that they are read with, and the base under the experts' heads.

A merge that fails leaves a note in the place of a model, so that the others go on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orthomerge.checkpoints.publish import write_json
from orthomerge.errors import IncompatibleError, NumericalError, OrthomergeError, OutputError, RecipeError
from orthomerge.pipeline import merge
from orthomerge.running.jobs.context import MODEL, Context
from orthomerge.running.jobs.kinds.whole import fit, whole
from orthomerge.running.models import expert_of
from orthomerge.running.sweeping.cutting import variant_of

__all__ = ["FAILED", "base", "expert", "failure_before", "may_pass", "noted", "told", "variant"]

FAILED = "failed.json"


def variant(context: Context, folder: Path) -> None:
    """One merge of the sweep, as `orthomerge merge` makes it."""
    context.plan.check_inputs(map(Path, context.plan.inputs))
    chosen = variant_of(context.job)
    document = json.loads(json.dumps(asdict(chosen.recipe(context.recipe))))
    alone = replace(context, plan=replace(context.plan, recipe=document))
    with noted(folder):
        (fit if chosen.fitted else whole)(alone, folder)


def base(context: Context, folder: Path) -> None:
    """The base under the experts' heads; where there is none, the average of the experts, which reads alike."""
    context.plan.check_inputs(map(Path, context.plan.inputs))
    recipe = replace(context.recipe.merging, method="average", parameters={}, vector=None, align=None, fit=None)
    if recipe.base is not None:
        recipe = replace(recipe, method="task_arithmetic", parameters={"scale": 0.0})
    merge(recipe, out=folder / MODEL)


def expert(context: Context, folder: Path) -> None:
    """The expert of one task, weights unchanged."""
    (like,) = context.needed("sweep-base")
    expert_of(context.recipe, like / MODEL, context.job.spec["task"], folder / MODEL)


def told(error: OrthomergeError) -> dict[str, Any]:
    """What went wrong, and whether it might not another time: for want of memory, say, but not by its own numbers."""
    lasting = isinstance(error, RecipeError | IncompatibleError | NumericalError)
    return {"message": str(error), "lasting": lasting}


def may_pass(place: Path) -> bool:
    """Whether a job failed for a reason that may be gone."""
    try:
        found = json.loads((place / FAILED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return not all(item["lasting"] for item in found)


@contextmanager
def noted(folder: Path) -> Iterator[None]:
    """What fails inside is written down and ends nothing, unless it is the disk."""
    try:
        yield
    except OutputError:
        raise
    except OrthomergeError as error:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(folder / FAILED, [told(error)])


def failure_before(context: Context, folder: Path) -> bool:
    """Whether something that a job needs failed; then it has failed as well, for the same reason."""
    for key in context.job.needs:
        if (found := context.store.place(key) / FAILED).is_file():
            write_json(folder / FAILED, json.loads(found.read_text(encoding="utf-8"))[:1])
            return True
    return False
