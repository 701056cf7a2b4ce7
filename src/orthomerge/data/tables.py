"""Texts in tables: one file, or one per split.

A row is a text, a label (id or name), and where there are any a split and, as `label_name`, the name of the id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.data.raw import BadRowError, Key, Part, Problems, Raw, check_key, check_text, shown, split_named
from orthomerge.data.rows import KINDS, kind_of, open_rows
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


def read_one(path: Path, columns: Columns) -> Raw:
    """A single file: with a column of splits, or all of the split that the file is called, or else train."""
    reader = _Reader(columns, Raw(str(path), "text"))
    reader.read(path, fixed=None, otherwise=split_named(kind_of(path)[0]) or "train")
    return reader.raw


def read_files(files: Mapping[Split, Sequence[Path]], columns: Columns, *, where: str) -> Raw:
    """The files of every split, in order."""
    reader = _Reader(columns, Raw(where, "text"))
    for split, paths in files.items():
        for path in paths:
            reader.read(path, fixed=split, otherwise=split)
    return reader.raw


def split_files(folder: Path) -> dict[Split, list[Path]]:
    """The tables in a folder that are called after splits, `train.csv` or `train-00000-of-00002.parquet`."""
    files: dict[Split, list[Path]] = {}
    shards: dict[Split, list[tuple[int, int]]] = {}
    for path in sorted(folder.iterdir()):
        stem, kind = kind_of(path)
        shard = _SHARD.fullmatch(stem)
        split = split_named(shard[1] if shard else stem)
        if kind in KINDS and split and path.is_file():
            files.setdefault(split, []).append(path)
            shards.setdefault(split, []).extend([(int(shard[2]), int(shard[3]))] if shard else [])
    for split, paths in files.items():
        whole = shards[split] == [(place, len(paths)) for place in range(len(paths))]
        if (shards[split] or len(paths) > 1) and not whole:
            raise CheckpointError(
                f"{folder}: the {split} split must be one file, or all shards of one, got "
                f"{some(path.name for path in paths)}"
            )
    return files


@dataclass
class _Reader:
    """Adds the rows of one file after another to `raw`."""

    columns: Columns
    raw: Raw
    texts: dict[Split, list[str]] = field(default_factory=dict)
    keys: dict[Split, list[Key]] = field(default_factory=dict)
    unlabelled: set[Split] = field(default_factory=set)

    def read(self, path: Path, *, fixed: Split | None, otherwise: Split) -> None:
        """Read a file. `fixed`: the split that its rows may not contradict; `otherwise`: of rows that name none."""
        asked, problems = self.columns, Problems(path)
        wanted = tuple(filter(None, (asked.text, asked.label, _NAME, asked.split)))
        table = open_rows(path, problems, wanted=wanted, label=asked.label)
        if table.columns:
            self._check_columns(path, table.columns)
        try:
            for label, name in table.names.items():
                self._name(label, name)
        except BadRowError as error:
            raise CheckpointError(f"{path} {error}") from error
        labelled = asked.labelled or asked.label in table.columns
        rows = 0
        for place, row in table.rows:
            rows += 1
            try:
                split = self._split(row, fixed) if asked.split in table.columns else otherwise
                text = check_text(row.get(asked.text), asked.text, keep_empty=asked.keep_empty)
                key = check_key(row.get(asked.label), asked.label) if labelled else None
                if key is not None and _NAME in table.columns:
                    self._name(key, row.get(_NAME))
            except BadRowError as error:
                problems.add(f"{place} {error}")
                continue
            self.texts.setdefault(split, []).append(text)
            if key is None:
                self.unlabelled.add(split)
            else:
                self.raw.first.setdefault(key, f"{path} {place}")
                self.keys.setdefault(split, []).append(key)
        problems.check()
        if not rows:
            raise CheckpointError(f"{path} is empty: it has no rows; fetch it again, or give another file")
        for split, texts in self.texts.items():
            self.raw.parts[split] = Part(texts, None if split in self.unlabelled else self.keys[split])

    def _check_columns(self, path: Path, columns: tuple[str, ...]) -> None:
        required = {"text": self.columns.text}
        if self.columns.labelled:
            required["label"] = self.columns.label
        if self.columns.split not in (None, _USUAL_SPLIT):
            required["split"] = str(self.columns.split)
        for option, column in required.items():
            if column not in columns:
                raise RecipeError(
                    f"{path} has no column {column!r}; {nearest(column, columns)}; say which with `{option}`"
                )

    def _split(self, row: Mapping[str, Any], fixed: Split | None) -> Split:
        word = row.get(self.columns.split or "")
        split = split_named(word) if isinstance(word, str) else None
        if split is None:
            raise BadRowError(f"has split {shown(word)}, which must be train, val or test")
        if fixed and split != fixed:
            raise BadRowError(f"says split {shown(word)} in the file of {fixed}")
        return split

    def _name(self, key: Key, name: object) -> None:
        if not isinstance(name, str) or not name:
            raise BadRowError(f"has no name as {_NAME!r} but {shown(name)}")
        if self.raw.names.setdefault(key, name) != name:
            raise BadRowError(f"calls label {key!r} {name!r}, which was {self.raw.names[key]!r} before")
