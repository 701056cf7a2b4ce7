"""Texts in tables: one file, or one per split.

A row is a text, a label (id or name), and where there are any a split and, as `label_name`, the name of the id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orthomerge.core.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.data.raw import BadRowError, Key, Part, Problems, Raw, check_key, check_text, shown, split_named
from orthomerge.data.rows import KINDS, Rows, kind_of, open_rows
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

    def check(self, where: object, present: tuple[str, ...]) -> None:
        """Refuse a table that lacks a column."""
        required = {"text": self.text}
        if self.labelled:
            required["label"] = self.label
        if self.split not in (None, _USUAL_SPLIT):
            required["split"] = str(self.split)
        for option, column in required.items():
            if column not in present:
                raise RecipeError(
                    f"{where} has no column {column!r}; {nearest(column, present)}; say which with `{option}` "
                    f"(--{option}-column)"
                )


Parts = dict[Split, tuple[list[str], list[Key | None]]]  # texts and labels


def read_tables(files: Iterable[tuple[Path, Split | None]], columns: Columns, *, where: str) -> Raw:
    """Files in order, each with the split that its rows may not contradict.

    Without one, rows that name no split are of the one that the file is called after, else of train.
    """
    raw, parts = Raw(where, "text"), Parts()
    for path, split in files:
        problems = Problems(path)
        wanted = tuple(filter(None, (columns.text, columns.label, _NAME, columns.split)))
        table = open_rows(path, problems, wanted=wanted, label=columns.label)
        add_rows(raw, parts, table, problems, columns, fixed=split, usual=split_named(kind_of(path)[0]) or "train")
    close(raw, parts)
    return raw


def split_files(folder: Path) -> list[tuple[Path, Split]]:
    """The tables in a folder that are called after splits, `train.csv` or `train-00000-of-00002.parquet`."""
    files: dict[Split, list[tuple[Path, int, int]]] = {}
    for path in sorted(folder.iterdir()):
        stem, kind = kind_of(path)
        shard = _SHARD.fullmatch(stem)
        split = split_named(shard[1] if shard else stem)
        if kind in KINDS and split and path.is_file():
            files.setdefault(split, []).append((path, int(shard[2]), int(shard[3])) if shard else (path, 0, 1))
    for split, shards in files.items():
        if [each[1:] for each in shards] != [(place, len(shards)) for place in range(len(shards))]:
            raise CheckpointError(
                f"{folder}: the {split} split must be one file, or all shards of one, got "
                f"{some(path.name for path, *_ in shards)}"
            )
    return [(path, split) for split, shards in files.items() for path, *_ in shards]


def add_rows(
    raw: Raw, parts: Parts, table: Rows, problems: Problems, columns: Columns, *, fixed: Split | None, usual: Split
) -> None:
    """Add the rows of a table to `parts`, and what it says of its labels to `raw`.

    `fixed`: the split that rows may not contradict. `usual`: the split of rows that name none.
    """
    where = problems.where
    if table.columns:
        columns.check(where, table.columns)
    try:
        for label, name in table.names.items():
            _add_name(raw, label, name)
    except BadRowError as error:
        raise CheckpointError(f"{where} {error}") from error
    labelled = columns.labelled or columns.label in table.columns
    place = ""
    for place, row in table.rows:
        try:
            split = fixed or usual
            if columns.split in table.columns:
                split = _split(row.get(str(columns.split)), fixed)
            text = check_text(row.get(columns.text), columns.text, keep_empty=columns.keep_empty)
            key = check_key(row.get(columns.label), columns.label) if labelled else None
            if key is not None and _NAME in table.columns:
                _add_name(raw, key, row.get(_NAME))
        except BadRowError as error:
            problems.add(f"{place} {error}")
            continue
        texts, keys = parts.setdefault(split, ([], []))
        texts.append(text)
        keys.append(key)
        if key is not None:
            raw.first.setdefault(key, f"{where} {place}")
    problems.check()
    if not place:
        raise CheckpointError(f"{where} is empty: it has no rows; fetch it again, or give another file")


def close(raw: Raw, parts: Parts) -> None:
    """Store the rows in `raw`; a split is unlabelled if any of its rows has no label."""
    for split, (texts, keys) in parts.items():
        labels = [key for key in keys if key is not None]
        raw.parts[split] = Part(texts, labels if len(labels) == len(keys) else None)


def _split(word: object, fixed: Split | None) -> Split:
    split = split_named(word) if isinstance(word, str) else None
    if split is None:
        raise BadRowError(f"has split {shown(word)}, which must be train, val or test")
    if fixed and split != fixed:
        raise BadRowError(f"says split {shown(word)} in the file of {fixed}")
    return split


def _add_name(raw: Raw, key: Key, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise BadRowError(f"has no name as {_NAME!r} but {shown(name)}")
    if raw.names.setdefault(key, name) != name:
        raise BadRowError(f"calls label {key!r} {name!r}, which was {raw.names[key]!r} before")
