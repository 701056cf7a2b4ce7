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
from orthomerge.data.labels import Key, Part, Raw, check_rows, split_named
from orthomerge.data.rows import KINDS, Rows, kind_of, open_rows
from orthomerge.data.task import Split

_NAME = "label_name"
_SPLIT = "split"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


class BadRowError(Exception):
    """Problem with a row; its message follows the location of the row."""


@dataclass(frozen=True)
class Columns:
    """Names of columns; `keep_empty` allows empty texts, and `labelled` requires labels."""

    text: str = "text"
    label: str = "label"
    keep_empty: bool = False
    labelled: bool = True

    def check(self, where: object, present: Sequence[str]) -> None:
        required = {"text": self.text} | ({"label": self.label} if self.labelled else {})
        for option, column in required.items():
            if column not in present:
                raise RecipeError(
                    f"{where} has no column {column!r}; {nearest(column, present)}; "
                    f"name it with `{option}` (--{option}-column)"
                )

    def read(self, row: Mapping[str, Any], present: Sequence[str]) -> tuple[str, Key | None]:
        """Return text and label of a row; the label is None if the table has none."""
        text, key = row.get(self.text), row.get(self.label)
        if not isinstance(text, str):
            raise BadRowError(f"must have a text as {self.text!r}, got {text!r:.40}")
        if not text.strip() and not self.keep_empty:
            raise BadRowError(f"has an empty {self.text!r}")
        if not self.labelled and self.label not in present:
            return text, None
        if isinstance(key, bool) or not isinstance(key, int | str) or key == "":
            raise BadRowError(f"must have a whole number or a name as {self.label!r}, got {key!r:.40}")
        return text, key


def read_tables(files: Iterable[tuple[Path, Split | None]], columns: Columns, *, where: str) -> Raw:
    """Read files in order; rows without a split belong to that of the file, or that of its name, or else to train."""
    raw = Raw(where, "text")
    wanted = (columns.text, columns.label, _NAME, _SPLIT)
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
            raise CheckpointError(
                f"{folder}: the {split} split must be one file, or all shards of one, got "
                f"{some(path.name for path, *_ in shards)}"
            )
    return [(path, split) for split, shards in files.items() for path, *_ in shards]


def add_rows(raw: Raw, table: Rows, columns: Columns, *, where: str, fixed: Split | None, default: Split) -> None:
    """Add the rows of a table to `raw`; rows must belong to the split `fixed`, and without one belong to `default`."""
    if table.columns:
        columns.check(where, table.columns)
    try:
        for label, name in table.names.items():
            _add_name(raw, label, name)
    except BadRowError as error:
        raise CheckpointError(f"{where} {error}") from error
    problems: list[str] = []
    location = None
    for location, row, problem in table.rows:
        if problem:
            problems.append(f"{location} {problem}")
            continue
        try:
            split = _split(row.get(_SPLIT), fixed) if _SPLIT in table.columns else default
            text, key = columns.read(row, table.columns)
            if _NAME in table.columns and key is not None:
                _add_name(raw, key, row.get(_NAME))
        except BadRowError as error:
            problems.append(f"{location} {error}")
            continue
        part = raw.parts.setdefault(split, Part([], []))
        part.inputs.append(text)
        if key is not None:
            part.keys.append(key)
            raw.first.setdefault(key, f"{where} {location}")
    check_rows(where, problems)
    if location is None:
        raise CheckpointError(f"{where} is empty: it has no rows; fetch it again, or give another file")


def _split(name: object, fixed: Split | None) -> Split:
    split = split_named(name) if isinstance(name, str) else None
    if split is None:
        raise BadRowError(f"must have split train, val or test, got {name!r:.40}")
    if fixed and split != fixed:
        raise BadRowError(f"must have split {fixed}, as the others in this file, got {name!r:.40}")
    return split


def _add_name(raw: Raw, key: Key, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise BadRowError(f"must have a name as {_NAME!r}, got {name!r:.40}")
    if raw.names.setdefault(key, name) != name:
        raise BadRowError(f"must have the name {raw.names[key]!r} for label {key!r}, as before, got {name!r}")
