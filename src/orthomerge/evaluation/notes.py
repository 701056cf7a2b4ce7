"""What would make a reader doubt the numbers of a run, in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from orthomerge.core.errors import CheckpointError
from orthomerge.data.task import Split, Task
from orthomerge.evaluation.compare import contamination
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import accuracy, predictions
from orthomerge.evaluation.records import read_document

_WORTH_A_NOTE = 0.01  # of the test inputs; public datasets have a few in a thousand


def contamination_notes(encoded: EncodedTasks) -> list[str]:
    """Test inputs that are training inputs too, and experts that are suspiciously better on test than on val."""
    notes = [note for name, task in encoded.tasks.items() if (note := _shared(name, task)) is not None]
    for task, expert in encoded.teachers.items():
        encoded.keep([expert])
        scores = {split: score for split in ("test", "val") if (score := _score(encoded, task, split)) is not None}
        if len(scores) == 2 and (warning := contamination(scores["test"], scores["val"], task=task)):
            notes.append(warning)
    return notes


def read_notes(path: Path) -> list[str]:
    """The notes that a run wrote."""
    notes = read_document(path, fix="; evaluate again")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise CheckpointError(f"{path} must be a list of strings; evaluate again")
    return notes


def _shared(name: str, task: Task) -> str | None:
    """How many test inputs are also inputs for training or validation; pictures on disk are not decoded for it."""
    parts = {split: part.inputs for split, part in task.splits.items()}
    if "test" not in parts or not all(isinstance(inputs, list | tuple) for inputs in parts.values()):
        return None
    seen = {_identity(item) for split, inputs in parts.items() if split != "test" for item in inputs}
    count = sum(_identity(item) in seen for item in parts["test"])
    if count < _WORTH_A_NOTE * len(parts["test"]) or not count:
        return None
    return (
        f"{count} of {len(parts['test'])} test inputs of {name!r} are among those for training or validation: what is "
        "fitted there has seen them; take them out of one split"
    )


def _identity(item: object) -> str | tuple[tuple[int, ...], bytes]:
    if isinstance(item, str):
        return item
    array = np.ascontiguousarray(item)
    return array.shape, array.tobytes()


def _score(encoded: EncodedTasks, task: str, split: Split) -> float | None:
    """The expert's accuracy; None if the split has no labels."""
    splits = encoded.tasks[task].splits if task in encoded.tasks else {}
    labels = splits[split].labels if split in splits else None
    if labels is None or not len(labels):
        return None
    return accuracy(predictions(encoded.teacher_logits(task, split)), torch.tensor(labels, dtype=torch.int64))
