"""Datasets of Hugging Face's `datasets`: of the hub, as `org/name[:config][@revision]`, or saved to disk.

Splits that are not called train, val(idation) or test are no part of a task. A split whose labels are all -1, as the
hub marks labels that are not public, has none. Pictures are decoded here when they are used, not by `datasets`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.data.images import decode
from orthomerge.data.raw import BadRowError, Key, Problems, Raw, by_split, check_key, check_text
from orthomerge.data.task import Lazy, Split
from orthomerge.files.hub import is_hub_id

if TYPE_CHECKING:
    from orthomerge.data.tables import Columns


_UNKNOWN = -1


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def is_dataset_id(text: str) -> bool:
    """Whether a text has the form `org/name[:config][@revision]`."""
    name, config, revision = _parsed(text)
    return is_hub_id(f"{name}@{revision}" if revision else name) and (config is None or bool(config))


def read_saved(folder: Path, columns: Columns) -> Raw:
    """What `save_to_disk` wrote."""
    library = _library(str(folder))
    try:
        data = library.load_from_disk(str(folder))
    except Exception as error:  # arrow's errors, those of the file system, and its own
        raise CheckpointError(f"cannot load the dataset {folder}: {_summary(error)}") from error
    return _raw(library, data, str(folder), columns)


def read_hub(reference: str, columns: Columns) -> Raw:
    """A dataset of the hub, or of the cache if that is all there is."""
    library = _library(f"{reference!r}, which is no path that exists and must be a hub id,")
    name, config, revision = _parsed(reference)
    try:
        data = library.load_dataset(name, name=config, revision=revision)
    except Exception as error:  # as many kinds as there are ways for a hub to be out of reach
        raise CheckpointError(
            f"cannot load the dataset {reference!r}: {_summary(error)}; it is no path that exists: check the spelling, "
            "the network and, if it is gated, `hf auth login`"
        ) from error
    return _raw(library, data, reference, columns)


def _raw(library: Any, data: Any, where: str, columns: Columns) -> Raw:
    datasets = data if isinstance(data, Mapping) else {str(getattr(data, "split", None) or "train"): data}
    splits = by_split(map(str, datasets), where)
    if not splits:
        raise CheckpointError(f"{where} has no split called train, val or test, got {some(datasets)}")
    raw = Raw(where, "text")
    for split, word in splits.items():
        _add(raw, library, datasets[word].with_format(None), split, columns)
    return raw


def _add(raw: Raw, library: Any, dataset: Any, split: Split, columns: Columns) -> None:
    origin, features = f"{raw.where} ({split})", dataset.features
    pictures = [name for name, feature in features.items() if isinstance(feature, library.Image)]
    column = pictures[0] if columns.text not in features and len(pictures) == 1 else columns.text
    if not len(dataset):
        raise CheckpointError(f"{origin} is empty")
    for option, name in (("text", column), ("label", columns.label)):
        if name not in features:
            raise RecipeError(f"{origin} has no column {name!r}; {nearest(name, features)}; say which with `{option}`")
    if isinstance(features[columns.label], library.ClassLabel):
        raw.names.update(enumerate(features[columns.label].names or ()))
    labels: list[Key] = list(dataset[columns.label])
    hidden = split != "train" and all(label == _UNKNOWN for label in labels)
    keys = None if hidden else labels
    _check(origin, keys or (), partial(_check_key, column=columns.label))
    if column in pictures:
        raw.modality = "image"
        inputs: Sequence[Any] = _pictures(library, dataset, column, origin)
    else:
        inputs = list(dataset[column])
        _check(origin, inputs, partial(check_text, column=column, keep_empty=columns.keep_empty))
    raw.add(split, inputs, keys, (f"{origin} row {number}" for number in count(1)))


def _check(origin: str, values: Iterable[Any], check: Callable[[Any], object]) -> None:
    problems = Problems(origin)
    for number, value in enumerate(values, 1):
        try:
            check(value)
        except BadRowError as error:
            problems.add(f"row {number} {error}")
    problems.check()


def _check_key(value: object, column: str) -> None:
    if value == _UNKNOWN:
        raise BadRowError(f"has no label as {column!r} but {_UNKNOWN}")
    check_key(value, column)


def _pictures(library: Any, dataset: Any, column: str, origin: str) -> Lazy:
    stored = dataset.select_columns([column]).cast_column(column, library.Image(decode=False))

    def load(place: int) -> object:
        where = f"{origin} row {place + 1}"
        item = stored[place][column] or {}
        source = item.get("bytes") or item.get("path")
        if not source:
            raise CheckpointError(f"{where} has no picture")
        return decode(source if isinstance(source, bytes) else Path(source), where=where)

    return Lazy(range(len(dataset)), load)


def _parsed(reference: str) -> tuple[str, str | None, str | None]:
    rest, _, revision = reference.partition("@")
    name, colon, config = rest.partition(":")
    return name, config if colon else None, revision or None


def _library(what: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise RecipeError(f"reading {what} needs Hugging Face's datasets: pip install datasets") from error


def _summary(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
