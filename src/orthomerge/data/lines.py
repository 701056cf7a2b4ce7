"""Text files of rows, gzipped or not, read line by line with bounds: JSON lines, and comma- or tab-separated values.

A .tsv has no quoting, as those of GLUE: a quotation mark in a text is a quotation mark. A .csv has.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from orthomerge.core.errors import CheckpointError, some
from orthomerge.files.documents import parse_json

if TYPE_CHECKING:
    from orthomerge.data.raw import Key, Problems


_LONGEST_LINE = 16 << 20
_MOST_BYTES = 16 << 30  # unpacked: more does not fit in memory anyway
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Table:
    """Columns, and rows that are read as they are asked for, each with its place; `names` if it names its labels."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[str, Mapping[str, Any]]]
    names: Mapping[Key, str] = field(default_factory=dict)


@contextmanager
def stream(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if its name ends in .gz."""
    try:
        packed = path.name.casefold().endswith(".gz")
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            yield cast("IO[bytes]", file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read {path}: {reason}; fetch it again") from error


def open_json_lines(path: Path, problems: Problems) -> Table:
    """One JSON object a line; the first tells the columns."""
    rows = _json_rows(path, problems)
    first = next(rows, None)
    return Table((), rows) if first is None else Table(tuple(first[1]), chain([first], rows))


def open_delimited(path: Path, problems: Problems, *, tabs: bool) -> Table:
    """Separated values; the first line names the columns."""
    texts = (text for _, text in _texts(path))
    reader = (
        csv.reader(texts, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
        if tabs
        else csv.reader(texts, strict=True)
    )
    header = next(_records(path, reader), [])
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise CheckpointError(f"{path} has two columns called {some(twice)}")

    def rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for record in _records(path, reader):
            if len(record) == len(header):
                yield f"line {reader.line_num}", dict(zip(header, record, strict=True))
            else:
                problems.add(f"line {reader.line_num} has {len(record)} columns instead of {len(header)}")

    return Table(tuple(header), rows())


def _json_rows(path: Path, problems: Problems) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in _lines(path):
        if number == 1 and line.lstrip().startswith(b"["):
            raise CheckpointError(
                f"{path} must hold one JSON object a line, got a list; rewrite it: jq -c '.[]' list.json > rows.jsonl"
            )
        try:
            yield f"line {number}", parse_json(line, f"line {number}")
        except CheckpointError as error:
            problems.add(str(error))


def _records(path: Path, reader: Any) -> Iterator[list[str]]:
    try:
        yield from (record for record in reader if record)
    except csv.Error as error:
        raise CheckpointError(
            f"{path} line {reader.line_num} is not valid: {error}; correct the line (quotes, line breaks)"
        ) from error


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in _lines(path, blank=True):
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} line {number} is not UTF-8; convert the file") from error


def _lines(path: Path, *, blank: bool = False) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, numbered from 1; those with nothing on them are left out unless `blank`."""
    total = 0
    with stream(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
            total += len(line)
            if len(line) > _LONGEST_LINE or total > _MOST_BYTES:
                raise CheckpointError(
                    f"{path} line {number}: a line may have {_LONGEST_LINE} bytes, and all of them {_MOST_BYTES}"
                )
            if blank or line.strip():
                yield number, line.removeprefix(_BOM) if number == 1 else line
