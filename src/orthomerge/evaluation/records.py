"""Scores with their settings, written as JSON lines, and facts about a run, written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from orthomerge.core.errors import CheckpointError, OrthomergeError, RecipeError
from orthomerge.core.schema import build
from orthomerge.data.task import Access, Split
from orthomerge.files.replacing import replace_file

INFO = "run.json"
_USUAL: dict[Access, Split | None] = {"data-free": None, "inductive": "train", "transductive": "test"}


@dataclass(frozen=True)
class Way:
    """Way in which a model was scored; only records of equal ways share a row of a table or are compared."""

    protocol: str
    options: tuple[tuple[str, str], ...]
    shots: int | float | None
    access: Access
    support: Split | None
    aligner: str | None

    @property
    def title(self) -> str:
        name = self.protocol if self.aligner is None else f"aligner {self.aligner}"
        parts = [name, *(f"{option}={value}" for option, value in self.options)]
        if self.shots is not None:
            parts.append(f"{self.shots:g}/class" if self.shots >= 1 else f"{self.shots:.0%}")
        if self.support not in (None, _USUAL[self.access]):
            parts.append(f"from {self.support}")
        return ", ".join(parts)


def option_texts(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, json.dumps(value, sort_keys=True)) for name, value in sorted(options.items()))


@dataclass(frozen=True)
class Record:
    """One value of one metric with its 95 % interval.

    `method` is the merge (or `expert`, `base`, `mtl`), `support` the split of the support inputs and `shots` their
    number per class (None: all, or none needed), `extra_parameters` the count of numbers that inference needs beyond
    encoder and heads, `inputs` the digest of the model.
    """

    task: str
    method: str
    protocol: str
    metric: Literal["accuracy"]
    value: float
    low: float
    high: float
    examples: int
    access: Access
    split: str = "test"
    seed: int = 0
    shots: int | float | None = None
    support: Split | None = None
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    aligner: str | None = None
    extra_parameters: int = 0
    predictions: str | None = None
    suite: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def way(self) -> Way:
        return Way(self.protocol, option_texts(self.options), self.shots, self.access, self.support, self.aligner)


def write_records(path: Path, records: Iterable[Record]) -> None:
    lines = (json.dumps(asdict(record), ensure_ascii=False, sort_keys=True) + "\n" for record in records)
    replace_file(path, "".join(lines).encode())


def write_document(path: Path, document: object, *, indent: int | None = 2) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)
    replace_file(path, f"{text}\n".encode())


def read_document(path: Path, *, error: type[OrthomergeError] = CheckpointError, fix: str = "") -> Any:
    """Read a JSON file of a run. `error`: the error for a file that is not JSON; `fix`: end of messages, what to do."""
    text = _read_text(path, fix)
    try:
        return json.loads(text)
    except ValueError as failure:
        raise error(f"{path} is not JSON: {failure}{fix}") from failure


def _read_text(path: Path, fix: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}{fix}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}{fix}") from error


def read_records(path: Path) -> list[Record]:
    """Read JSON lines; an error names the first line that is not a record."""
    # Not `splitlines`: strings in JSON may contain other line separators of Unicode.
    lines = _read_text(path).removesuffix("\n").split("\n")
    records = []
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            records.append(build(Record, json.loads(line), where=f"{path} line {number}"))
        except json.JSONDecodeError as error:
            raise RecipeError(f"{path} line {number} is not JSON: {error}") from error
    return records


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run. `recipe`: its text. `seconds`: per stage. `memory`: peak in bytes. `manifests`: folders of
    outputs, relative to the run folder, or their manifests (`method`, `inputs` with hashes, `heads`, ...).
    """

    command: str = ""
    recipe: str = ""
    started: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    memory: int | None = None
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    manifests: tuple[str | dict[str, Any], ...] = ()


def read_info(path: Path) -> RunInfo:
    return build(RunInfo, read_document(path, error=RecipeError), where=str(path))


def write_info(path: Path, info: RunInfo) -> None:
    write_document(path, asdict(info))
