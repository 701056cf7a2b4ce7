"""The trainings of a suite: each one described, done if it was not before, here or in several processes.

A step of a small model costs what Python costs, so that processes side by side share a GPU with profit. What they
write is what one process writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from orthomerge.suites.processes import side_by_side
from orthomerge.tuning.finetune import finetune
from orthomerge.tuning.multitask import finetune_jointly
from orthomerge.tuning.settings import choose_device

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Examples, Task
    from orthomerge.suites.suite import Say
    from orthomerge.tuning.settings import Tuning

__all__ = ["Training", "train_missing"]


@dataclass(frozen=True)
class Training:
    """An expert of one task in `root`/TASK, or, `jointly`, one encoder with a head for each task."""

    tasks: Mapping[str, Task]
    base: Path
    root: Path
    settings: Tuning
    processor: Processor
    others: Sequence[Examples] = ()
    jointly: bool = False

    @property
    def done(self) -> bool:
        return all((self.root / name / "config.json").is_file() for name in self.tasks)

    @property
    def size(self) -> int:
        return sum(len(task["train"]) for task in self.tasks.values())

    def run(self) -> str:
        """Train and write; what there is to say about it."""
        # One training takes minutes at most, and what is done is kept: no state within one.
        if self.jointly:
            finetune_jointly(
                self.tasks,
                base=self.base,
                out_root=self.root,
                settings=self.settings,
                processor=self.processor,
                force=True,
                resume=False,
            )
            return "trained on all tasks together"
        ((name, task),) = self.tasks.items()
        metrics = finetune(
            task,
            base=self.base,
            out=self.root / name,
            settings=self.settings,
            processor=self.processor,
            others=self.others,
            resume=False,
        )
        return f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items())


def train_missing(trainings: Sequence[Training], *, workers: int, say: Say) -> None:
    """Do those that are not done: here, one after the other, or in `workers` processes, the largest first."""
    missing = [training for training in trainings if not training.done]
    workers = min(workers, len(missing))
    if workers <= 1:
        for training in missing:
            say(training.run())
        return
    ordered = sorted(missing, key=lambda training: -training.size)
    threads = _threads(missing, workers)
    for _, told in side_by_side([training.run for training in ordered], workers=workers, threads=threads):
        say(told)


def _threads(trainings: Sequence[Training], workers: int) -> int:
    """Threads of one of several processes: the cores are shared, and beside a GPU one is enough."""
    if any(choose_device(training.settings.device).type != "cpu" for training in trainings):
        return 1
    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workers))
