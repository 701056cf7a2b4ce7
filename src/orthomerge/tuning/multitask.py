"""Joint training: one encoder for all tasks, a head for each; the MTL row of the papers' tables."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError
from orthomerge.files.ownership import EXPERT
from orthomerge.files.publish import publish
from orthomerge.tuning.making import Making
from orthomerge.tuning.state import clear_state, state_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orthomerge.data.task import Task
    from orthomerge.models.processing import Processor
    from orthomerge.tuning.loop import Progress
    from orthomerge.tuning.settings import Tuning


_MODES = ("full", "head_first")


def finetune_jointly(
    tasks: Mapping[str, Task],
    *,
    base: Path,
    out_root: Path,
    settings: Tuning,
    processor: Processor,
    family: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
    resume: bool = True,
) -> dict[str, dict[str, float]]:
    """Train on the batches of all tasks, each as often as its size asks for, in an order drawn by the seed.

    Writes a classifier for each task to `out_root`/NAME: the same encoder in each, with the task's head.
    """
    if settings.mode not in _MODES:
        raise RecipeError(f"joint training must have mode {' or '.join(_MODES)}, got {settings.mode!r}")
    if not tasks:
        raise RecipeError("joint training needs at least one task, got none")
    for name in tasks:
        if Path(name).name != name:
            raise RecipeError(f"{name!r} cannot name a task here: it becomes the name of a folder")
    named = [replace(task, name=name) for name, task in tasks.items()]
    making = Making("joint", named, base, settings, processor, family=family, progress=progress)
    making.check()
    with ExitStack() as stack:
        folders = {
            name: stack.enter_context(
                publish(out_root / name, force=force, need=making.bytes_to_write, inputs=[base], marker=EXPERT)
            )
            for name in tasks
        }
        metrics = making.run(folders, state=state_folder(out_root) if resume else None)
    clear_state(state_folder(out_root))
    return metrics
