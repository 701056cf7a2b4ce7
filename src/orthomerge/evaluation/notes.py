"""Warnings about the scores of a run: inputs that two splits share, experts that may have seen the test inputs."""

from __future__ import annotations

import numpy as np

from orthomerge.data.task import Split, Task
from orthomerge.evaluation.encoded import EncodedTasks

_WORTH_A_NOTE = 0.01  # of the test inputs; public datasets have a few in a thousand
_SUSPICIOUS = 0.05  # gap between accuracy on test and on validation data


def contamination_notes(encoded: EncodedTasks) -> list[str]:
    """Test inputs that are training inputs too, and experts that are suspiciously better on test than on val."""
    notes = [_shared(name, task) for name, task in encoded.tasks.items()]
    for task, expert in encoded.teachers.items():
        encoded.keep([expert])
        test, val = (_accuracy(encoded, task, split) for split in ("test", "val"))
        if test is not None and val is not None:
            notes.append(contamination(test, val, task=task))
    return [note for note in notes if note is not None]


def contamination(test: float, val: float, *, task: str) -> str | None:
    """A warning if an expert is suspiciously better on test than on validation data."""
    gap = test - val
    if gap <= _SUSPICIOUS:
        return None
    return (
        f"the expert of {task!r} scores {100 * test:.1f} on test but {100 * val:.1f} on validation data, "
        f"{100 * gap:.1f} points less (more than {100 * _SUSPICIOUS:g}): it may have been trained on the test inputs"
    )


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


def _accuracy(encoded: EncodedTasks, task: str, split: Split) -> float | None:
    """The expert's accuracy; None if the split has no labels."""
    examples = encoded.tasks[task].splits.get(split) if task in encoded.tasks else None
    if examples is None or examples.labels is None or not len(examples):
        return None
    return encoded.score(encoded.teacher(task), task, split).value
