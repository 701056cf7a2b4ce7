"""Parquet files through pyarrow, which is asked for only here. Label names that `datasets` stored are used."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.data.lines import Table, stream

if TYPE_CHECKING:
    from orthomerge.data.raw import Key


_MOST_UNPACKED = 4 << 30  # a gzipped file must be unpacked whole before it can be read
_ROWS = 4096


def open_parquet(path: Path, *, wanted: tuple[str, ...], label: str) -> Table:
    """The `wanted` columns of a file, a few thousand rows at a time."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise RecipeError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    source: Any = path
    if path.name.casefold().endswith(".gz"):
        with stream(path) as packed:
            data = packed.read(_MOST_UNPACKED + 1)
        if len(data) > _MOST_UNPACKED:
            raise CheckpointError(f"{path} unpacks to more than {_MOST_UNPACKED} bytes; unpack it first")
        source = arrow.BufferReader(data)
    try:
        file = parquet.ParquetFile(source)
        schema = file.schema_arrow
    except Exception as error:  # arrow's own errors, and those of the file system
        raise _broken(path, error) from error
    columns = tuple(schema.names)

    def rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
        number = 0
        try:
            present = [name for name in wanted if name in columns]
            for batch in file.iter_batches(batch_size=_ROWS, columns=present, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except Exception as error:
            raise _broken(path, error) from error

    return Table(columns, rows(), _names((schema.metadata or {}).get(b"huggingface"), label))


def _names(metadata: bytes | None, label: str) -> dict[Key, str]:
    """The names of a ClassLabel column, which `datasets` keeps in the schema."""
    try:
        names = json.loads(metadata or b"{}")["info"]["features"][label]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {place: str(name) for place, name in enumerate(names)} if isinstance(names, list) else {}


def _broken(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as parquet ({error}); it is damaged: fetch it again")
