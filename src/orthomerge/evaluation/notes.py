"""What would make a reader doubt the numbers of a run, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from orthomerge.data.task import Split
from orthomerge.evaluation.bench import Bench
from orthomerge.evaluation.compare import contamination
from orthomerge.evaluation.metrics import accuracy, predictions
from orthomerge.evaluation.tables import lines
from orthomerge.records import Control, Record

__all__ = ["contamination_notes", "control_notes"]

_WHY: Mapping[Control, str] = {
    "shuffled-teacher": "what this protocol gains does not come from the expert; look for a leak",
    "other-task": "inputs of another task do part of the work; are they much like those of this one?",
}


def contamination_notes(bench: Bench) -> list[str]:
    """Experts that are suspiciously better on test than on validation data, where both have labels."""
    found = []
    for task in bench.teachers:
        scores = {split: score for split in ("test", "val") if (score := _score(bench, task, split)) is not None}
        if len(scores) == 2 and (warning := contamination(scores["test"], scores["val"], task=task)):
            found.append(warning)
        bench.forget()
    return found


def control_notes(records: Sequence[Record]) -> list[str]:
    """Controls that do better than they should, by more than other test inputs could explain."""
    return [
        f"the control {row.control!r} of {row.method!r} under {row.title} ({row.access}) scores {row.mean:.1f} "
        f"({row.low:.1f}-{row.high:.1f}) but should be no better than {row.bound:.1f}: {_WHY[row.control]}"
        for row in lines(records, controls=True)
        if row.bound is not None and row.control is not None and row.low > row.bound
    ]


def _score(bench: Bench, task: str, split: Split) -> float | None:
    """The expert's accuracy; None where it cannot be told."""
    splits = bench.tasks[task].splits if task in bench.tasks else {}
    labels = splits[split].labels if split in splits else None
    if labels is None or not len(labels):
        return None
    return accuracy(predictions(bench.teacher(task, split)), torch.tensor(labels, dtype=torch.int64))
