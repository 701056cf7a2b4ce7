"""Read texts from tables: one file, or one per split.

A row has a text, a label (id or name), and optionally a split and, as `label_name`, the name of the id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.data.labels import Key, Part, Problems, Raw, split_named
from orthomerge.data.rows import KINDS, BadRowError, Rows, kind_of, open_rows
from orthomerge.data.task import Split

_NAME = "label_name"
_DEFAULT_SPLIT = "split"  # may be missing, unlike a column that the caller chooses
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class Columns:
    """Names of columns; `keep_empty` allows empty texts, and `labelled` requires labels."""

    text: str = "text"
    label: str = "label"
    split: str | None = _DEFAULT_SPLIT
    keep_empty: bool = False
    labelled: bool = True

    def check(self, where: object, present: Sequence[str]) -> None:
        """Refuse a table that lacks a column."""
        required = {"text": self.text}
        if self.labelled:
            required["label"] = self.label
        if self.split not in (None, _DEFAULT_SPLIT):
            required["split"] = str(self.split)
        for option, column in required.items():
            if column not in present:
                raise RecipeError(
                    f"{where} has no column {column!r}; {nearest(column, present)}; "
                    f"name it with `{option}` (--{option}-column)"
                )


def read_tables(files: Iterable[tuple[Path, Split | None]], columns: Columns, *, where: str) -> Raw:
    """Read files in order; if a file has a split, all of its rows must belong to it.

    Otherwise, rows without a split belong to the one that the file is named after, or else to train.
    """
    raw = Raw(where, "text")
    wanted = tuple(filter(None, (columns.text, columns.label, _NAME, columns.split)))
    for path, split in files:
        rows = open_rows(path, wanted=wanted, label=columns.label)
        default = split or split_named(kind_of(path)[0]) or "train"
        add_rows(raw, rows, columns, where=str(path), fixed=split, default=default)
    return raw


def split_files(folder: Path) -> list[tuple[Path, Split]]:
    """Return the tables of a folder that are named after splits: `train.csv`, `train-00000-of-00002.parquet`, ..."""
    files: dict[Split, list[tuple[Path, int, int]]] = {}
    for path in sorted(folder.iterdir()):
        stem, kind = kind_of(path)
        shard = _SHARD.fullmatch(stem)
        split = split_named(shard[1] if shard else stem)
        if kind in KINDS and split and path.is_file():
            files.setdefault(split, []).append((path, int(shard[2]), int(shard[3])) if shard else (path, 0, 1))
    for split, shards in files.items():
        if [numbers for _, *numbers in shards] != [[index, len(shards)] for index in range(len(shards))]:
            names = some(path.name for path, *_ in shards)
            raise CheckpointError(f"{folder}: the {split} split must be one file, or all shards of one, got {names}")
    return [(path, split) for split, shards in files.items() for path, *_ in shards]


def add_rows(raw: Raw, table: Rows, columns: Columns, *, where: str, fixed: Split | None, default: Split) -> None:
    """Add the rows of a table and the names of its labels to `raw`.

    `fixed`: the split that all rows must belong to. `default`: the split of rows without one.
    """
    if table.columns:
        columns.check(where, table.columns)
    try:
        for label, name in table.names.items():
            _add_name(raw, label, name)
    except BadRowError as error:
        raise CheckpointError(f"{where} {error}") from error
    problems, location = Problems(where), ""
    for location, row in table.rows:
        try:
            split, text, key = _read_row(raw, row, table.columns, columns, fixed=fixed, default=default)
        except BadRowError as error:
            problems.add(f"{location} {error}")
            continue
        part = raw.parts.setdefault(split, Part([], []))
        part.inputs.append(text)
        if key is not None:
            part.keys.append(key)
            raw.first.setdefault(key, f"{where} {location}")
    problems.check()
    if not location:
        raise CheckpointError(f"{where} is empty: it has no rows; fetch it again, or give another file")


def _read_row(
    raw: Raw,
    row: Mapping[str, Any] | BadRowError,
    present: Sequence[str],
    columns: Columns,
    *,
    fixed: Split | None,
    default: Split,
) -> tuple[Split, str, Key | None]:
    """Return split, text and label of a row, and add the name of its label to `raw`."""
    if isinstance(row, BadRowError):
        raise row
    split = _split(row.get(str(columns.split)), fixed) if columns.split in present else default
    text, key = row.get(columns.text), row.get(columns.label)
    if not isinstance(text, str):
        raise BadRowError(f"must have a text as {columns.text!r}, got {_shortened(text)}")
    if not text.strip() and not columns.keep_empty:
        raise BadRowError(f"has an empty {columns.text!r}")
    if not columns.labelled and columns.label not in present:
        return split, text, None
    if isinstance(key, bool) or not isinstance(key, int | str) or key == "":
        raise BadRowError(f"must have a whole number or a name as {columns.label!r}, got {_shortened(key)}")
    if _NAME in present:
        _add_name(raw, key, row.get(_NAME))
    return split, text, key


def _split(name: object, fixed: Split | None) -> Split:
    split = split_named(name) if isinstance(name, str) else None
    if split is None:
        raise BadRowError(f"must have split train, val or test, got {_shortened(name)}")
    if fixed and split != fixed:
        raise BadRowError(f"must have split {fixed}, as the others in this file, got {_shortened(name)}")
    return split


def _add_name(raw: Raw, key: Key, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise BadRowError(f"must have a name as {_NAME!r}, got {_shortened(name)}")
    if raw.names.setdefault(key, name) != name:
        raise BadRowError(f"must have the name {raw.names[key]!r} for label {key!r}, as before, got {name!r}")


def _shortened(value: object) -> str:
    """Return a value as text for a message, at most 40 characters long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
