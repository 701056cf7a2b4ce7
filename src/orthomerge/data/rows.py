"""Read rows of tables one by one, with limits on size: JSON lines, csv and tsv, gzipped or not, and parquet.

A .csv can have quoted fields; in a .tsv, as in those of GLUE, a quotation mark is part of the text.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, RecipeError, some
from orthomerge.data.labels import Key
from orthomerge.files.documents import parse_json

KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_MAX_LINE = 16 << 20
_MAX_BYTES = 16 << 30  # unpacked; more would not fit in memory
_BATCH = 4096  # rows of parquet per read
_BOM = b"\xef\xbb\xbf"

Row = tuple[str, Mapping[str, Any], str]  # location, fields, and the problem of a row that cannot be read


@dataclass(frozen=True)
class Rows:
    """Columns and lazily read rows of a table; `names` are the names of its labels, if the file has them."""

    columns: tuple[str, ...]
    rows: Iterator[Row]
    names: Mapping[Key, str] = field(default_factory=dict)


def kind_of(path: Path) -> tuple[str, str]:
    """Return the stem and the suffix of a file name without .gz, such as `train` and `.csv`."""
    name = path.name[:-3] if _is_packed(path) else path.name
    return Path(name).stem, Path(name).suffix.casefold()


def open_rows(path: Path, *, wanted: tuple[str, ...], label: str) -> Rows:
    """Open a table file; of parquet only the `wanted` columns are read. `label`: column whose ids may have names."""
    kind = kind_of(path)[1]
    if kind in (".jsonl", ".json"):
        return _json_rows(path)
    if kind in (".csv", ".tsv"):
        return _delimited_rows(path, tabs=kind == ".tsv")
    if _is_packed(path):
        raise CheckpointError(f"{path} must not be gzipped: parquet is compressed already; unpack it")
    return _parquet_rows(path, wanted, label)


def records(path: Path, *, tabs: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and fields of every line of a csv or tsv file that is not empty."""
    lines = (_text(path, number, line) for number, line in _lines(path))
    reader: Any = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines, strict=True)
    try:
        for record in reader:
            if record:
                yield reader.line_num, record
    except csv.Error as error:
        raise CheckpointError(
            f"{path} line {reader.line_num} is not valid: {error}; correct the line (quotes, line breaks)"
        ) from error


def _delimited_rows(path: Path, *, tabs: bool) -> Rows:
    lines = records(path, tabs=tabs)
    _, header = next(lines, (0, []))
    duplicates = sorted(name for name, count in Counter(header).items() if count > 1)
    if duplicates:
        raise CheckpointError(f"{path} has two columns called {some(duplicates)}")

    def rows() -> Iterator[Row]:
        for number, record in lines:
            problem = "" if len(record) == len(header) else f"has {len(record)} columns instead of {len(header)}"
            yield f"line {number}", dict(zip(header, record, strict=False)), problem

    return Rows(tuple(header), rows())


def _json_rows(path: Path) -> Rows:
    """Open a file with one JSON object per line; the first line must have all columns."""

    def rows() -> Iterator[Row]:
        for number, line in _lines(path):
            if number == 1 and line.lstrip().startswith(b"["):
                raise CheckpointError(
                    f"{path} must hold one JSON object per line, got a list; "
                    "rewrite it: jq -c '.[]' list.json > rows.jsonl"
                )
            if line.strip():
                try:
                    yield f"line {number}", parse_json(line, ""), ""
                except CheckpointError as error:
                    yield f"line {number}", {}, str(error).strip()

    remaining = rows()
    first = list(islice(remaining, 1))
    return Rows(tuple(name for _, row, _ in first for name in row), chain(first, remaining))


def _parquet_rows(path: Path, wanted: tuple[str, ...], label: str) -> Rows:
    """Open a file with pyarrow, which reads a few thousand rows at a time; label names of `datasets` are used."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise RecipeError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    with _parquet_errors(path):
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
    columns = tuple(schema.names)

    def rows() -> Iterator[Row]:
        number = 0
        with _parquet_errors(path):
            present = [name for name in wanted if name in columns]
            for batch in file.iter_batches(batch_size=_BATCH, columns=present, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row, ""

    return Rows(columns, rows(), _label_names((schema.metadata or {}).get(b"huggingface"), label))


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # errors of arrow and of the file system
        raise CheckpointError(f"{path} cannot be read as parquet ({error}); it is damaged: fetch it again") from error


def _label_names(metadata: bytes | None, label: str) -> dict[Key, str]:
    try:
        names = json.loads(metadata or b"{}")["info"]["features"][label]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {index: str(name) for index, name in enumerate(names)} if isinstance(names, list) else {}


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} line {number} is not UTF-8; convert the file") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    total = 0
    try:
        with gzip.open(path, "rb") if _is_packed(path) else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), 1):
                total += len(line)
                if len(line) > _MAX_LINE or total > _MAX_BYTES:
                    limits = f"a line must have at most {_MAX_LINE} bytes, and all lines {_MAX_BYTES}"
                    raise CheckpointError(f"{path} line {number}: {limits}; give a smaller file")
                yield number, line.removeprefix(_BOM) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise CheckpointError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}; fetch it again"
        ) from error


def _is_packed(path: Path) -> bool:
    return path.name.casefold().endswith(".gz")
