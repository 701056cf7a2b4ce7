"""The trainings of a suite: each one described, and done if it was not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.tuning.finetune import finetune, finetune_jointly

if TYPE_CHECKING:
    from orthomerge.data.task import Examples, Task
    from orthomerge.models.processing import Processor
    from orthomerge.suites.suite import Say
    from orthomerge.tuning.settings import Tuning


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


def train_missing(trainings: Sequence[Training], *, say: Say) -> None:
    """Do those that are not done, one after the other."""
    for training in trainings:
        if not training.done:
            say(training.run())
