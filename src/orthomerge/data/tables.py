"""Texts in tables: one file, or one per split.

A row is a text, a label (id or name), and where there are any a split and, as `label_name`, the name of the id.
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
_USUAL_SPLIT = "split"  # may be missing; a column that the caller chose may not
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class Columns:
    """Which columns to read, whether a text may be empty, and whether a table must have labels."""

    text: str = "text"
    label: str = "label"
    split: str | None = _USUAL_SPLIT
    keep_empty: bool = False
    labelled: bool = True

    def check(self, where: object, present: Sequence[str]) -> None:
        """Refuse a table that lacks a column."""
        required = {"text": self.text}
        if self.labelled:
            required["label"] = self.label
        if self.split not in (None, _USUAL_SPLIT):
            required["split"] = str(self.split)
        for option, column in required.items():
            if column not in present:
                raise RecipeError(
                    f"{where} has no column {column!r}; {nearest(column, present)}; "
                    f"say which with `{option}` (--{option}-column)"
                )


def read_tables(files: Iterable[tuple[Path, Split | None]], columns: Columns, *, where: str) -> Raw:
    """Read files in order, each with the split that its rows may not contradict.

    Without one, rows that name no split are of the split that the file is called after, else of train.
    """
    raw = Raw(where, "text")
    wanted = tuple(filter(None, (columns.text, columns.label, _NAME, columns.split)))
    for path, split in files:
        rows = open_rows(path, wanted=wanted, label=columns.label)
        usual = split or split_named(kind_of(path)[0]) or "train"
        add_rows(raw, rows, columns, where=str(path), fixed=split, usual=usual)
    return raw


def split_files(folder: Path) -> list[tuple[Path, Split]]:
    """Find the tables in a folder that are called after splits, `train.csv` or `train-00000-of-00002.parquet`."""
    files: dict[Split, list[tuple[Path, int, int]]] = {}
    for path in sorted(folder.iterdir()):
        stem, kind = kind_of(path)
        shard = _SHARD.fullmatch(stem)
        split = split_named(shard[1] if shard else stem)
        if kind in KINDS and split and path.is_file():
            files.setdefault(split, []).append((path, int(shard[2]), int(shard[3])) if shard else (path, 0, 1))
    for split, shards in files.items():
        if [each[1:] for each in shards] != [(place, len(shards)) for place in range(len(shards))]:
            names = some(path.name for path, *_ in shards)
            raise CheckpointError(f"{folder}: the {split} split must be one file, or all shards of one, got {names}")
    return [(path, split) for split, shards in files.items() for path, *_ in shards]


def add_rows(raw: Raw, table: Rows, columns: Columns, *, where: str, fixed: Split | None, usual: Split) -> None:
    """Add the rows of a table to `raw`, and what it says of its labels.

    `fixed`: the split that rows may not contradict. `usual`: the split of rows that name none.
    """
    if table.columns:
        columns.check(where, table.columns)
    try:
        for label, name in table.names.items():
            _add_name(raw, label, name)
    except BadRowError as error:
        raise CheckpointError(f"{where} {error}") from error
    problems, place = Problems(where), ""
    for place, row in table.rows:
        try:
            split, text, key = _read_row(raw, row, table.columns, columns, fixed=fixed, usual=usual)
        except BadRowError as error:
            problems.add(f"{place} {error}")
            continue
        part = raw.parts.setdefault(split, Part([], []))
        part.inputs.append(text)
        if key is not None:
            part.keys.append(key)
            raw.first.setdefault(key, f"{where} {place}")
    problems.check()
    if not place:
        raise CheckpointError(f"{where} is empty: it has no rows; fetch it again, or give another file")


def _read_row(
    raw: Raw,
    row: Mapping[str, Any] | BadRowError,
    present: Sequence[str],
    columns: Columns,
    *,
    fixed: Split | None,
    usual: Split,
) -> tuple[Split, str, Key | None]:
    """Return split, text and label of a row, and add the name of its label to `raw`."""
    if isinstance(row, BadRowError):
        raise row
    split = _split(row.get(str(columns.split)), fixed) if columns.split in present else usual
    text, key = row.get(columns.text), row.get(columns.label)
    if not isinstance(text, str):
        raise BadRowError(f"has no text as {columns.text!r} but {_cut(text)}")
    if not text.strip() and not columns.keep_empty:
        raise BadRowError(f"has an empty {columns.text!r}")
    if not columns.labelled and columns.label not in present:
        return split, text, None
    if isinstance(key, bool) or not isinstance(key, int | str) or key == "":
        raise BadRowError(f"has no whole number or name as {columns.label!r} but {_cut(key)}")
    if _NAME in present:
        _add_name(raw, key, row.get(_NAME))
    return split, text, key


def _split(word: object, fixed: Split | None) -> Split:
    split = split_named(word) if isinstance(word, str) else None
    if split is None:
        raise BadRowError(f"has split {_cut(word)}, which must be train, val or test")
    if fixed and split != fixed:
        raise BadRowError(f"says split {_cut(word)} in the file of {fixed}")
    return split


def _add_name(raw: Raw, key: Key, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise BadRowError(f"has no name as {_NAME!r} but {_cut(name)}")
    if raw.names.setdefault(key, name) != name:
        raise BadRowError(f"calls label {key!r} {name!r}, which was {raw.names[key]!r} before")


def _cut(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
