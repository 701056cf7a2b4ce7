"""One measurement and everything that says what it means; written as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from orthomerge.errors import CheckpointError, RecipeError
from orthomerge.strict import build

__all__ = ["Access", "Record", "read_records", "write_records"]

# Which inputs a method saw before it was scored: none; some that are not scored (train or val); for every scored input
# only others of the test set; the scored inputs themselves.
Access = Literal["data-free", "inductive", "cross-fitted", "transductive"]


@dataclass(frozen=True)
class Record:
    """One value of one metric.

    `method` is the merge (or `expert`, `base`, `mtl`), `protocol` how it was read, `shots` the support per class
    (None: all, or none needed), `low` and `high` the 95 % interval, `examples` how many were scored,
    `extra_parameters` what inference needs beyond encoder and heads.
    """

    task: str
    method: str
    protocol: str
    metric: str
    value: float
    low: float
    high: float
    examples: int
    access: Access
    split: str = "test"
    seed: int = 0
    shots: int | float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    aligner: str | None = None
    extra_parameters: int = 0
    predictions: str | None = None
    suite: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write JSON lines, whole or not at all."""
    text = "".join(json.dumps(asdict(record), ensure_ascii=False, sort_keys=True) + "\n" for record in records)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_records(path: Path) -> list[Record]:
    """Read JSON lines back; a line that is no record is an error that names it."""
    found = []
    try:
        # Not `splitlines`: JSON keeps some of the other line ends that Unicode has as they are.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            found.append(build(Record, json.loads(line), where=f"{path} line {number}"))
        except json.JSONDecodeError as error:
            raise RecipeError(f"{path} line {number} is not JSON: {error}") from error
    return found
