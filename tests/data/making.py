"""Rows, pictures and arrays small enough to check by eye."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from orthomerge.core.errors import CheckpointError
from orthomerge.data.reading import read_task

Row = dict[str, Any]


def refused(source: Any, match: str, error: type[Exception] = CheckpointError, **options: Any) -> None:
    """Reading a task must fail with an error that says `match`."""
    with pytest.raises(error, match=match):
        read_task(source, **options)


def make_rows(train: int = 20, test: int = 4, names: Sequence[str] = ("zebra", "ape")) -> list[Row]:
    """Texts `train 0`, `train 1`, ... whose labels take turns; ids are not in the order of the names."""
    return [
        {"split": split, "text": f"{split} {n}", "label": n % len(names), "label_name": names[n % len(names)]}
        for split, count in (("train", train), ("test", test))
        for n in range(count)
    ]


def write(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows as whatever the file's name says."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(list(rows)), path)
        return path
    file: Any = gzip.open if path.suffix == ".gz" else open
    with file(path, "wt", encoding="utf-8", newline="") as out:
        if kind in ("csv", "tsv"):
            dialect = csv.excel if kind == "csv" else csv.excel_tab
            writer = csv.DictWriter(out, list(rows[0]), dialect=dialect)
            writer.writeheader()
            writer.writerows(rows)
        else:
            out.write("".join(json.dumps(row) + "\n" for row in rows))
    return path


def picture(path: Path, value: int | tuple[int, int, int] = 0, size: tuple[int, int] = (4, 3)) -> Path:
    """Save a picture of one grey value or colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "L" if isinstance(value, int) else "RGB"
    Image.new(mode, size, value).save(path)
    return path


def arrays(path: Path, **changes: Any) -> Path:
    """Save an .npz of two classes, with some arrays changed or (None) left out."""
    held: dict[str, Any] = {
        "x_train": np.arange(20 * 2 * 2, dtype=np.uint8).reshape(20, 2, 2),
        "y_train": np.arange(20) % 2,
        "x_test": np.zeros((4, 2, 2), np.uint8),
        "y_test": np.array([0, 1, 1, 0]),
        "label_names": np.array(["zebra", "ape"]),
    }
    kept = {name: value for name, value in {**held, **changes}.items() if value is not None}
    np.savez_compressed(path, **kept)
    return path
