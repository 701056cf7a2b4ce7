"""A user's data as tasks, with labels in the order of the heads; inputs that are given as objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError, nearest, some
from orthomerge.data.images import decode, pixels
from orthomerge.data.labels import match_labels
from orthomerge.data.reading import ColumnSource, read_task
from orthomerge.data.rows import KINDS, kind_of
from orthomerge.data.sampling import share
from orthomerge.data.task import Examples, Modality, Split, Task, pick


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
    if isinstance(data, ColumnSource):
        sources = {task: ColumnSource(source, data.text, data.label) for task, source in sources.items()}
    return {task: sources[task] for task in names if task in sources}


def unlabelled_tasks(
    data: Mapping[str, Any],
    labels: Mapping[str, tuple[str, ...]],
    modality: str,
    *,
    split: Split,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Task]:
    """The inputs of one split by task, without labels; a source may also be a list of inputs.

    `labels`: of the heads that will read them. If a source has labels, they must have these names: data of another task
    would have others. `limit`: the largest number of inputs, drawn by `seed` whatever their labels are.
    """
    if limit is not None and limit < 1:
        raise RecipeError(f"'limit' must be at least 1, got {limit}")
    tasks = {}
    for name, task in _tasks(data, labels, modality, split=split).items():
        inputs = task[split].inputs
        if limit is not None and limit < len(inputs):
            inputs = pick(inputs, share(len(inputs), limit / len(inputs), seed=seed))
        tasks[name] = Task(name, labels[name], task.modality, {split: Examples(inputs, None, split)})
    return tasks


def labelled_tasks(data: Mapping[str, Any], labels: Mapping[str, tuple[str, ...]], modality: str) -> dict[str, Task]:
    """All splits by task, labels in the order of the heads."""
    return _tasks(data, labels, modality)


def _tasks(
    data: Mapping[str, Any], labels: Mapping[str, tuple[str, ...]], modality: str, *, split: Split | None = None
) -> dict[str, Task]:
    """Every source as a task whose labels are in the order of its head. `split`: of inputs that need no labels."""
    if not data:
        raise RecipeError("there is no data: give --data TASK=PATH for at least one task")
    for name in data:
        if name not in labels:
            raise RecipeError(f"there is data of {name!r}, but no task of that name; {nearest(name, labels)}")
    tasks = {}
    for name, source in data.items():
        task = source
        if split is not None and isinstance(source, list):
            inputs = Examples([as_input(item, modality) for item in source], None, split)
            task = Task(name, labels[name], cast("Modality", modality), {split: inputs})
        elif not isinstance(source, Task):
            task = read_task(source, unlabelled=None if split is None else labels[name])
        if task.modality != modality:
            raise IncompatibleError(
                f"the model reads inputs of modality {modality!r}, but those of {name!r} are {task.modality!r}; "
                "give the data that its expert was trained on"
            )
        tasks[name] = match_labels(replace(task, name=name), labels[name])
    return tasks


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
