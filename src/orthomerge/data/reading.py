"""Read data in any supported form as tasks, with labels in the order of the heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from orthomerge.core.checks import at_least_one
from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError, nearest, some
from orthomerge.data.datasets_hub import names_dataset, read_hub
from orthomerge.data.images import decode, pixels, read_arrays, read_folder
from orthomerge.data.labels import Key, Raw, match_labels, resolve, split_named
from orthomerge.data.rows import KINDS, kind_of
from orthomerge.data.tables import Columns, read_tables, split_files
from orthomerge.data.task import Examples, Labels, Modality, Split, Task, pick, share, stratified

_MAX_VALIDATION = 5000
_WAY_OUT = (
    f"a task is a table ({', '.join(KINDS)}, all but parquet also .gz) or one per split (train.csv, val.csv, "
    "test.csv), an .npz, folders of pictures (split/class/*.png), or a dataset of Hugging Face"
)


class ColumnSource(str):
    """Path or name of a source, with the names of its columns of texts and labels."""

    text: str
    label: str

    # A copy is made without columns and gets them afterwards.
    def __new__(cls, source: str, text: str = "text", label: str = "label") -> Self:
        self = super().__new__(cls, source)
        self.text, self.label = text, label
        return self


def read_task(
    source: str | Path,
    *,
    name: str | None = None,
    modality: Modality | None = None,
    text: str = "text",
    label: str = "label",
    labels: tuple[str, ...] | None = None,
    validation: float = 0.1,
    keep_empty: bool = False,
    unlabelled: tuple[str, ...] | None = None,
) -> Task:
    """Read a task from a file, a folder, or a hub id `org/name[:config][@revision]`.

    `text`, `label`: columns of a table (`text` is also the column of pictures of a dataset). `labels`: names in the
    requested order. `validation`: the share of train that becomes val if there is none (stratified, always the
    same examples, at most 5000); 0 for no val. `unlabelled`: names of the labels for a source without labels; if None,
    a table without a column of labels is refused.
    """
    if not 0 <= validation < 1:
        raise RecipeError(f"'validation' must be at least 0 and less than 1, got {validation}")
    if not isinstance(source, str | Path):
        raise RecipeError(f"the data of a task must be a path or the name of a dataset, got {type(source).__name__}")
    if isinstance(source, ColumnSource):
        text, label = source.text, source.label
    raw = _read(source, Columns(text, label, keep_empty, labelled=unlabelled is None))
    if modality is not None and modality != raw.modality:
        raise RecipeError(f"{raw.where} must hold inputs of modality {modality!r}, got {raw.modality!r}")
    indices: dict[Key, int] = {}
    if unlabelled is not None and all(part.labels is None for part in raw.parts.values()):
        names = unlabelled
    else:
        names, indices = resolve(raw, labels)
    splits: dict[Split, Examples] = {}
    for split_name, part in raw.parts.items():
        keys = part.labels
        ids = None if keys is None else np.array([indices[key] for key in keys], dtype=np.int64)
        splits[split_name] = Examples(part.inputs, ids, split_name)
    train = splits.get("train")
    if train is not None and train.labels is not None:
        sizes = np.bincount(train.labels, minlength=len(names))
        if empty := [names[index] for index in np.flatnonzero(sizes == 0)]:
            raise CheckpointError(f"{raw.where}: the train split has no examples of {some(empty)}")
        if "val" not in splits and validation:
            splits |= split_off(train, train.labels, validation)
    order: tuple[Split, ...] = ("train", "val", "test")
    ordered: dict[str, Examples] = {split_name: splits[split_name] for split_name in order if split_name in splits}
    return Task(name or _name(source), names, raw.modality, ordered)


def may_be_read(source: str) -> bool:
    """Return whether a path exists, or a text has the form of a dataset's name; nothing is opened."""
    try:
        return Path(source).expanduser().exists() or names_dataset(source)
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a user without home, a null byte
        return False


def _read(source: str | Path, columns: Columns) -> Raw:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_directory(path, columns)
    kind = kind_of(path)[1]
    if path.is_file():
        if kind == ".npz":
            return read_arrays(path)
        if kind in KINDS:
            return read_tables([(path, None)], columns, where=str(path))
        raise CheckpointError(f"{path} is not in a supported format; {_WAY_OUT}")
    if isinstance(source, str) and names_dataset(source):
        return read_hub(source, columns)
    raise CheckpointError(f"{path} does not exist; {_WAY_OUT}")


def _read_directory(folder: Path, columns: Columns) -> Raw:
    if files := split_files(folder):
        return read_tables(files, columns, where=str(folder))
    if any(path.is_dir() for path in folder.iterdir()):
        return read_folder(folder)
    raise CheckpointError(f"{folder} has no data in a supported format; {_WAY_OUT}")


def split_off(train: Examples, labels: Labels, ratio: float) -> dict[Split, Examples]:
    """Split a validation set off the training set; empty if there are too few examples."""
    chosen = stratified(labels, min(round(ratio * len(train)), _MAX_VALIDATION), seed=0)
    if not len(chosen):
        return {}
    rest = np.setdiff1d(np.arange(len(train)), chosen)
    return {"train": train.take(rest), "val": replace(train.take(chosen), split="val")}


def _name(source: str | Path) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve().name
    if path.is_file():
        stem = kind_of(path)[0]
        return path.resolve().parent.name if split_named(stem) else stem
    return str(source).partition("@")[0].replace(":", "-").rpartition("/")[2]


def sources_of(data: Mapping[str, Any] | str | Path, tasks: Iterable[str]) -> Mapping[str, Any]:
    """Return the source of each task: a mapping unchanged, or the files and folders of a folder named after tasks."""
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
            raise RecipeError(f"{sources[name]} and {path} are both named after {name!r}; move one away")
        sources[name] = str(path)
    if not sources:
        raise CheckpointError(f"{folder} has no file or folder named after a task ({some(names)})")
    if isinstance(data, ColumnSource):
        sources = {task: ColumnSource(source, data.text, data.label) for task, source in sources.items()}
    return {task: sources[task] for task in names if task in sources}


def labelled_tasks(
    data: Mapping[str, Any], labels: Mapping[str, tuple[str, ...]], modality: str, *, split: Split | None = None
) -> dict[str, Task]:
    """Read every source as a task with labels in the order of its head. `split`: the split of lists of inputs."""
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


def unlabelled_tasks(
    data: Mapping[str, Any],
    labels: Mapping[str, tuple[str, ...]],
    modality: str,
    *,
    split: Split,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Task]:
    """Read a split of each task's inputs, or lists, unlabelled. `labels`: the heads'; `limit`: most, by `seed`."""
    at_least_one(limit=limit)
    tasks = {}
    for name, task in labelled_tasks(data, labels, modality, split=split).items():
        inputs = task[split].inputs
        if limit is not None and limit < len(inputs):
            inputs = pick(inputs, share(len(inputs), limit / len(inputs), seed=seed))
        tasks[name] = Task(name, labels[name], task.modality, {split: Examples(inputs, None, split)})
    return tasks


def as_input(value: Any, modality: str) -> Any:
    """Return one input of a model: a text, or the pixels of an image file, a PIL image or an array."""
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
