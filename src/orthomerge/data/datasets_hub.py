"""Read datasets from the hub, as `org/name[:config][@revision]`, with Hugging Face's `datasets`.

Splits with names other than train, val(idation) and test are ignored. A split whose labels are all -1, as the hub
marks labels that are not public, is unlabelled. Pictures are decoded here, when they are used, not by `datasets`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, RecipeError, some, summary
from orthomerge.data.images import decode
from orthomerge.data.labels import Key, Raw, by_split
from orthomerge.data.rows import KINDS, Rows, kind_of
from orthomerge.data.tables import Columns, add_rows
from orthomerge.data.task import Lazy
from orthomerge.files.opening import is_hub_id

_UNKNOWN = -1


def names_dataset(text: str) -> bool:
    """Return whether a text has the form `org/name[:config][@revision]` and is not a file name."""
    name, config, revision = _parsed(text)
    valid = is_hub_id(f"{name}@{revision}" if revision else name) and config != ""
    return valid and kind_of(Path(text))[1] not in (*KINDS, ".npz", ".gz")


def read_hub(reference: str, columns: Columns) -> Raw:
    """Read a dataset from the hub, or from the cache if the hub cannot be reached."""
    advice = "it is not a path that exists: check the spelling, the network and, if it is gated, `hf auth login`"
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise RecipeError(
            f"reading {reference!r} needs Hugging Face's datasets: pip install datasets; {advice}"
        ) from error
    name, config, revision = _parsed(reference)
    try:
        data = library.load_dataset(name, name=config, revision=revision)
    except Exception as error:  # errors of arrow, of the file system, and of all ways for a hub to be unreachable
        raise CheckpointError(f"cannot load the dataset {reference!r}: {summary(error)}; {advice}") from error
    return _raw(library, data, reference, columns)


def _raw(library: Any, data: Any, where: str, columns: Columns) -> Raw:
    datasets = data if isinstance(data, Mapping) else {str(getattr(data, "split", None) or "train"): data}
    splits = by_split(map(str, datasets), where)
    if not splits:
        raise CheckpointError(f"{where} has no split called train, val or test, got {some(datasets)}")
    raw = Raw(where, "text")
    for split, name in splits.items():
        dataset, origin = datasets[name].with_format(None), f"{where} ({split})"
        columns = _with_pictures(columns, dataset.features, library)
        columns.check(origin, tuple(dataset.features))
        labels = list(dataset[columns.label])
        unlabelled = split != "train" and all(label == _UNKNOWN for label in labels)
        has_pictures = isinstance(dataset.features[columns.text], library.Image)
        inputs = map(str, range(len(labels))) if has_pictures else dataset[columns.text]
        rows = (
            (f"row {number}", {columns.text: text, columns.label: label}, "")
            for number, (text, label) in enumerate(zip(inputs, labels, strict=True), 1)
        )
        feature = dataset.features[columns.label]
        names: dict[Key, str] = dict(enumerate(feature.names or ())) if isinstance(feature, library.ClassLabel) else {}
        present = (columns.text,) if unlabelled else (columns.text, columns.label)
        read = replace(columns, labelled=not unlabelled)
        add_rows(raw, Rows(present, rows, names), read, where=origin, fixed=split, default=split)
        if has_pictures:
            raw.modality = "image"
            raw.parts[split] = replace(raw.parts[split], inputs=_pictures(library, dataset, columns.text, origin))
    return raw


def _with_pictures(columns: Columns, features: Mapping[str, Any], library: Any) -> Columns:
    """Return the columns; without a text column, the only column of pictures has the inputs."""
    pictures = [name for name, feature in features.items() if isinstance(feature, library.Image)]
    return replace(columns, text=pictures[0]) if columns.text not in features and len(pictures) == 1 else columns


def _pictures(library: Any, dataset: Any, column: str, origin: str) -> Lazy:
    stored = dataset.select_columns([column]).cast_column(column, library.Image(decode=False))

    def load(index: int) -> object:
        where = f"{origin} row {index + 1}"
        item = stored[index][column] or {}
        source = item.get("bytes") or item.get("path")
        if not source:
            raise CheckpointError(f"{where} has no picture")
        return decode(source if isinstance(source, bytes) else Path(source), where=where)

    return Lazy(range(len(dataset)), load)


def _parsed(reference: str) -> tuple[str, str | None, str | None]:
    rest, _, revision = reference.partition("@")
    name, colon, config = rest.partition(":")
    return name, config if colon else None, revision or None
