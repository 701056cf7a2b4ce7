"""A user's data as tasks, with labels in the order of the heads; inputs given as objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError, nearest, some
from orthomerge.data.images import decode, pixels
from orthomerge.data.labels import match_labels
from orthomerge.data.reading import read_inputs, read_task
from orthomerge.data.rows import KINDS, kind_of
from orthomerge.data.task import Examples, Modality, Split, Task

Labels = Mapping[str, tuple[str, ...]]


def sources_of(data: Mapping[str, Any] | str | Path, tasks: Iterable[str]) -> Mapping[str, Any]:
    """The source of each task: a mapping as it is, or what is called after a task in a folder.

    Such a file is TASK.csv, .tsv, .jsonl, .json, .parquet or .npz, also .gz; a folder has its tables or pictures.
    """
    if isinstance(data, Mapping):
        return data
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give one with a table per task, or TASK=PATH for each task")
    names, sources = list(tasks), dict[str, str]()
    for path in sorted(folder.iterdir()):
        name, kind = (path.name, None) if path.is_dir() else kind_of(path)
        if name not in names or kind not in (*KINDS, ".npz", None):
            continue
        if name in sources:
            raise RecipeError(f"{sources[name]} and {path} are both called after {name!r}; move one away")
        sources[name] = str(path)
    if not sources:
        raise CheckpointError(f"{folder} has no file or folder called after a task ({some(names)})")
    return {task: sources[task] for task in names if task in sources}


def unlabelled_tasks(
    data: Mapping[str, Any], labels: Labels, modality: str, *, split: Split, limit: int | None = None, seed: int = 0
) -> dict[str, Task]:
    """The inputs of one split by task, without labels; a source may also be a list of inputs.

    `labels`: of the heads that will read them.
    """
    _check_names(data, labels)
    tasks = {}
    for name, source in data.items():
        task = _task_of(name, source, labels[name], modality, split) if isinstance(source, list) else source
        tasks[name] = read_inputs(task, name=name, labels=labels[name], split=split, limit=limit, seed=seed)
    _check_modality(tasks, modality)
    return tasks


def _task_of(name: str, inputs: list[Any], labels: tuple[str, ...], modality: str, split: Split) -> Task:
    items = [as_input(item, modality) for item in inputs]
    return Task(name, labels, cast("Modality", modality), {split: Examples(items, None, split)})


def as_input(value: Any, modality: str) -> Any:
    """One input of a model: a text, or the pixels of a path, a PIL image or an array."""
    if modality == "text":
        if not isinstance(value, str):
            raise RecipeError(f"this model reads texts, got {type(value).__name__}; give strings")
        return value
    if isinstance(value, str | Path):
        return decode(Path(value), where=str(value))
    if hasattr(value, "convert"):
        return pixels(value, where="a PIL image")
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise RecipeError(
            f"an image must be a path, a PIL image or uint8 pixels [H, W] or [H, W, 3], got {array.dtype} {array.shape}"
        )
    return array


def labelled_tasks(data: Mapping[str, Any], labels: Labels, modality: str) -> dict[str, Task]:
    """All splits by task, labels in the order of the heads."""
    _check_names(data, labels)
    tasks = {
        name: match_labels(replace(source if isinstance(source, Task) else read_task(source), name=name), labels[name])
        for name, source in data.items()
    }
    _check_modality(tasks, modality)
    return tasks


def _check_names(data: Mapping[str, Any], labels: Labels) -> None:
    if not data:
        raise RecipeError("there is no data: give --data TASK=PATH for at least one task")
    for task in data:
        if task not in labels:
            raise RecipeError(f"there is data of {task!r}, but no task of that name; {nearest(task, labels)}")


def _check_modality(tasks: Mapping[str, Task], modality: str) -> None:
    for name, task in tasks.items():
        if task.modality != modality:
            raise IncompatibleError(
                f"the model reads inputs of modality {modality!r}, but those of {name!r} are {task.modality!r}; "
                "give the data that its expert was trained on"
            )
