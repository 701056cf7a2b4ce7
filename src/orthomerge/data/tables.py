"""Texts in tables: JSON lines, csv, tsv and parquet, each gzipped or not; one file, or one a split.

A row is a text, a label (id or name), and where there are any a split and, as `label_name`, the name of the id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.data.lines import Table, open_delimited, open_json_lines
from orthomerge.data.parquet import open_parquet
from orthomerge.data.raw import Key, Part, Problems, Raw, split_named

if TYPE_CHECKING:
    from orthomerge.data.task import Split


KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
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


def kind_of(path: Path) -> tuple[str, str]:
    """A file's name without its suffixes, and the suffix that says what it is; .gz does not count."""
    name = path.name[:-3] if path.name.casefold().endswith(".gz") else path.name
    return Path(name).stem, Path(name).suffix.casefold()


def read_one(path: Path, columns: Columns) -> Raw:
    """A single file: with a column of splits, or all of the split that the file is called, or else train."""
    gathered = _Gathered(columns)
    gathered.read(path, given=None, otherwise=split_named(kind_of(path)[0]) or "train")
    return gathered.raw(str(path))


def read_files(files: Mapping[Split, Sequence[Path]], columns: Columns, *, where: str) -> Raw:
    """The files of every split, in order."""
    gathered = _Gathered(columns)
    for split, paths in files.items():
        for path in paths:
            gathered.read(path, given=split, otherwise=split)
    return gathered.raw(where)


def split_files(folder: Path) -> dict[Split, list[Path]]:
    """The tables in a folder that are called after splits, `train.csv` or `train-00000-of-00002.parquet`."""
    found: dict[Split, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        stem, kind = kind_of(path)
        shard = _SHARD.fullmatch(stem)
        split = split_named(shard[1] if shard else stem)
        if kind in KINDS and split and path.is_file():
            found.setdefault(split, []).append(path)
    for split, paths in found.items():
        shards = [_SHARD.fullmatch(kind_of(path)[0]) for path in paths]
        places = [(int(shard[2]), int(shard[3])) for shard in shards if shard]
        whole = places == [(place, len(paths)) for place in range(len(paths))]
        if (places or len(paths) > 1) and not whole:
            raise CheckpointError(
                f"{folder}: the {split} split must be one file, or all shards of one, got "
                f"{some(path.name for path in paths)}"
            )
    return found


class _BadRowError(Exception):
    """What is wrong with a row."""


@dataclass
class _Gathered:
    """Rows of one file after another, by split."""

    columns: Columns
    texts: dict[Split, list[str]] = field(default_factory=dict)
    keys: dict[Split, list[Key]] = field(default_factory=dict)
    names: dict[Key, str] = field(default_factory=dict)
    first: dict[Key, str] = field(default_factory=dict)
    unlabelled: set[Split] = field(default_factory=set)

    def raw(self, where: str) -> Raw:
        parts = {
            split: Part(texts, None if split in self.unlabelled else self.keys[split])
            for split, texts in self.texts.items()
        }
        return Raw(where, "text", parts, self.names, self.first)

    def read(self, path: Path, *, given: Split | None, otherwise: Split) -> None:
        problems = Problems(path)
        table = _open(path, self.columns, problems)
        if table.columns:
            self._check_columns(path, table.columns)
        try:
            for label, name in table.names.items():
                self._call(label, name)
        except _BadRowError as error:
            raise CheckpointError(f"{path} {error}") from error
        labelled = self.columns.labelled or self.columns.label in table.columns
        rows = 0
        for place, row in table.rows:
            rows += 1
            try:
                split = self._split(row, given) if self.columns.split in table.columns else otherwise
                text = self._text(row)
                key = self._key(row) if labelled else None
                if key is not None and _NAME in table.columns:
                    self._call(key, row.get(_NAME))
            except _BadRowError as error:
                problems.add(f"{place} {error}")
                continue
            self.texts.setdefault(split, []).append(text)
            if key is None:
                self.unlabelled.add(split)
            else:
                self.first.setdefault(key, f"{path} {place}")
                self.keys.setdefault(split, []).append(key)
        problems.check()
        if not rows:
            raise CheckpointError(f"{path} is empty: it has no rows; fetch it again, or give another file")

    def _check_columns(self, path: Path, columns: tuple[str, ...]) -> None:
        asked = {"text": self.columns.text, "label": self.columns.label, "split": self.columns.split}
        for option, column in asked.items():
            optional = option == "split" and column in (None, _USUAL_SPLIT)
            optional = optional or (option == "label" and not self.columns.labelled)
            if not optional and column not in columns:
                raise RecipeError(
                    f"{path} has no column {column!r}; {nearest(str(column), columns)}; say which with `{option}`"
                )

    def _split(self, row: Mapping[str, Any], given: Split | None) -> Split:
        word = row.get(self.columns.split or "")
        split = split_named(word) if isinstance(word, str) else None
        if split is None:
            raise _BadRowError(f"has split {_shown(word)}, which must be train, val or test")
        if given and split != given:
            raise _BadRowError(f"says split {_shown(word)} in the file of {given}")
        return split

    def _text(self, row: Mapping[str, Any]) -> str:
        text = row.get(self.columns.text)
        if not isinstance(text, str):
            raise _BadRowError(f"has no text as {self.columns.text!r} but {_shown(text)}")
        if not text.strip() and not self.columns.keep_empty:
            raise _BadRowError(f"has an empty {self.columns.text!r}")
        return text

    def _key(self, row: Mapping[str, Any]) -> Key:
        key = row.get(self.columns.label)
        if isinstance(key, bool) or not isinstance(key, int | str) or key == "":
            raise _BadRowError(f"has no whole number or name as {self.columns.label!r} but {_shown(key)}")
        return key

    def _call(self, key: Key, name: object) -> None:
        if not isinstance(name, str) or not name:
            raise _BadRowError(f"has no name as {_NAME!r} but {_shown(name)}")
        if self.names.setdefault(key, name) != name:
            raise _BadRowError(f"calls label {key!r} {name!r}, which was {self.names[key]!r} before")


def _open(path: Path, columns: Columns, problems: Problems) -> Table:
    kind = kind_of(path)[1]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a plain file")
    if kind in (".jsonl", ".json"):
        return open_json_lines(path, problems)
    if kind in (".csv", ".tsv"):
        return open_delimited(path, problems, tabs=kind == ".tsv")
    if kind == ".parquet":
        wanted = (columns.text, columns.label, _NAME, *([columns.split] if columns.split else []))
        return open_parquet(path, wanted=wanted, label=columns.label)
    raise CheckpointError(f"{path} is no table: its name must end in {', '.join(KINDS)}, and .gz if it is gzipped")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
