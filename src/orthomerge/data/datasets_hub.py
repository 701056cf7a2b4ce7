"""Datasets of Hugging Face's `datasets`: of the hub, as `org/name[:config][@revision]`, or saved to disk.

Splits that are not called train, val(idation) or test are no part of a task. A split whose labels are all -1, as the
hub marks labels that are not public, has none. Pictures are decoded here when looked at, not by `datasets`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.data.images import decode
from orthomerge.data.inputs import Lazy
from orthomerge.data.raw import Key, Part, Problems, Raw, split_named
from orthomerge.files.hub import is_hub_id

if TYPE_CHECKING:
    from orthomerge.data.tables import Columns
    from orthomerge.data.task import Split


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
        found = library.load_from_disk(str(folder))
    except Exception as error:  # arrow's errors, those of the file system, and its own
        raise CheckpointError(f"cannot load the dataset {folder}: {_said(error)}") from error
    return _raw(library, found, str(folder), columns)


def read_hub(reference: str, columns: Columns) -> Raw:
    """A dataset of the hub, or of the cache if that is all there is."""
    library = _library(f"{reference!r}, which is no path that exists and must be a hub id,")
    name, config, revision = _parsed(reference)
    try:
        found = library.load_dataset(name, name=config, revision=revision)
    except Exception as error:  # as many kinds as there are ways for a hub to be out of reach
        raise CheckpointError(
            f"cannot load the dataset {reference!r}: {_said(error)}; it is no path that exists: check the spelling, "
            "the network and, if it is gated, `hf auth login`"
        ) from error
    return _raw(library, found, reference, columns)


def _raw(library: Any, found: Any, where: str, columns: Columns) -> Raw:
    parts: dict[Split, Part] = {}
    names: dict[Key, str] = {}
    first: dict[Key, str] = {}
    images = False
    for split, dataset in _splits(found, where).items():
        origin = f"{where} ({split})"
        column, images = _input_column(library, dataset.features, columns.text, origin)
        if not len(dataset):
            raise CheckpointError(f"{origin} is empty")
        if columns.label not in dataset.features:
            raise RecipeError(
                f"{origin} has no column {columns.label!r}; {nearest(columns.label, dataset.features)}; say which with "
                "`label`"
            )
        feature = dataset.features[columns.label]
        if isinstance(feature, library.ClassLabel) and feature.names:
            names.update(enumerate(feature.names))
        keys = _keys(list(dataset[columns.label]), columns.label, split, origin)
        for place, key in enumerate(keys or ()):
            if key not in first:
                first[key] = f"{origin} row {place + 1}"
        inputs = (
            _pictures(library, dataset, column, origin)
            if images
            else _texts(list(dataset[column]), column, origin, keep_empty=columns.keep_empty)
        )
        parts[split] = Part(inputs, keys)
    return Raw(where, "image" if images else "text", parts, names, first)


def _splits(found: Any, where: str) -> dict[Split, Any]:
    given = found if isinstance(found, Mapping) else {str(getattr(found, "split", None) or "train"): found}
    splits: dict[Split, Any] = {}
    for word, dataset in given.items():
        split = split_named(str(word))
        if split in splits:
            raise CheckpointError(f"{where} has two {split} splits")
        if split:
            splits[split] = dataset.with_format(None)
    if not splits:
        raise CheckpointError(f"{where} has no split called train, val or test, got {some(given)}")
    return splits


def _input_column(library: Any, features: Mapping[str, Any], asked: str, origin: str) -> tuple[str, bool]:
    """The column of inputs and whether it holds pictures: the one asked for, or else the only one with pictures."""
    pictures = [name for name, feature in features.items() if isinstance(feature, library.Image)]
    if asked in features:
        return asked, asked in pictures
    if len(pictures) == 1:
        return pictures[0], True
    raise RecipeError(f"{origin} has no column {asked!r}; {nearest(asked, features)}; say which with `text`")


def _keys(values: list[Any], column: str, split: Split, origin: str) -> list[Key] | None:
    if split != "train" and all(value == _UNKNOWN for value in values):
        return None
    problems = Problems(origin)
    for place, value in enumerate(values, 1):
        if isinstance(value, bool) or not isinstance(value, int | str) or value in (_UNKNOWN, ""):
            problems.add(f"row {place} has no label as {column!r} but {value!r}")
    problems.check()
    return values


def _texts(values: list[Any], column: str, origin: str, *, keep_empty: bool) -> Sequence[str]:
    problems = Problems(origin)
    for place, value in enumerate(values, 1):
        if not isinstance(value, str):
            problems.add(f"row {place} has no text as {column!r} but {type(value).__name__}")
        elif not value.strip() and not keep_empty:
            problems.add(f"row {place} has an empty {column!r}")
    problems.check()
    return values


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


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
