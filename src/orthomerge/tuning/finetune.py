"""Making one expert of a base and a labelled task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orthomerge.files.ownership import EXPERT
from orthomerge.files.publish import publish
from orthomerge.tuning.making import Making
from orthomerge.tuning.state import clear_state, state_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from orthomerge.data.task import Examples, Task
    from orthomerge.models.heads import Head
    from orthomerge.models.processing import Processor
    from orthomerge.tuning.loop import Progress
    from orthomerge.tuning.settings import Tuning


def finetune(
    task: Task,
    *,
    base: Path,
    out: Path,
    settings: Tuning,
    processor: Processor,
    others: Sequence[Examples] = (),
    head: Head | None = None,
    family: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
    resume: bool = True,
    inputs: Iterable[Path] = (),
) -> dict[str, float]:
    """Fine-tune `base` on a task's train split and write the expert to `out`; the metrics of the last epoch.

    `others`: inputs of other tasks, for `tau_jp`. `head`: to start from; `frozen_head`, and CLIP without a linear
    head, keep it as it is. `resume`: keep the state of every epoch beside `out`, so that a killed run can go on.
    `inputs`: the files that `task` and `others` were read from, which `out` must not overlap.
    A `linearised` or `tau_jp` expert is written as ordinary weights, but must be evaluated as the linear model that it
    is: see `models.linearised.linearise`.
    """
    making = Making(task.name, [task], base, settings, processor, others, head, family, progress)
    making.check()
    with publish(out, force=force, need=making.bytes_to_write, inputs=[base, *inputs], marker=EXPERT) as folder:
        metrics = making.run({task.name: folder}, state=state_folder(out) if resume else None)
    clear_state(state_folder(out))
    return metrics[task.name]
