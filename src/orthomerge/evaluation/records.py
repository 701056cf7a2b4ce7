"""One measurement and everything that says what it means, written as JSON lines; and how a run was made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, OrthomergeError, RecipeError
from orthomerge.core.schema import build
from orthomerge.data.task import Access, Split
from orthomerge.files.replacing import replace_file
from orthomerge.models.heads import KINDS

INFO = "run.json"
_HEADLINES = frozenset(kind.metric for kind in KINDS.values())
_USUAL: dict[Access, Split | None] = {"data-free": None, "inductive": "train", "transductive": "test"}


@dataclass(frozen=True)
class Way:
    """How a model was scored: what records must share to stand in one row, or to be compared with each other."""

    protocol: str
    options: tuple[tuple[str, str], ...]
    shots: int | float | None
    access: Access
    support: Split | None
    aligner: str | None

    @property
    def title(self) -> str:
        """In words, without what a table's title says."""
        name = self.protocol if self.aligner is None else f"aligner {self.aligner}"
        parts = [name, *(f"{option}={value}" for option, value in self.options)]
        if self.shots is not None:
            parts.append(f"{self.shots:g}/class" if self.shots >= 1 else f"{self.shots:.0%}")
        if self.support not in (None, _USUAL[self.access]):
            parts.append(f"from {self.support}")
        return ", ".join(parts)


def option_texts(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Options as a `Way` holds them: in the order of their names, with values in JSON."""
    return tuple((name, json.dumps(value, sort_keys=True)) for name, value in sorted(options.items()))


@dataclass(frozen=True)
class Record:
    """One value of one metric.

    `method` is the merge (or `expert`, `base`, `mtl`), `protocol` with its `options` how it was scored, `support` where
    the inputs for that came from and `shots` how many of each class (None: all, or none needed), `low` and `high` the
    95 % interval, `examples` how many were scored, `extra_parameters` what inference needs beyond encoder and heads.
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
    def headline(self) -> bool:
        """Whether the metric is the one that tables and comparisons are about."""
        return self.metric in _HEADLINES

    @property
    def way(self) -> Way:
        """How the model was scored."""
        return Way(self.protocol, option_texts(self.options), self.shots, self.access, self.support, self.aligner)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write JSON lines, whole or not at all."""
    lines = (json.dumps(asdict(record), ensure_ascii=False, sort_keys=True) + "\n" for record in records)
    write_text(path, "".join(lines))


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, or leave the one that is there as it is."""
    replace_file(path, text.encode())


def write_document(path: Path, document: object) -> None:
    """Write a JSON file whole, or leave the one that is there as it is."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_document(path: Path, *, error: type[OrthomergeError] = CheckpointError, fix: str = "") -> Any:
    """What a JSON file of a run says. `error`: of which kind a file is that is no JSON; `fix`: what to do about it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise CheckpointError(f"cannot read {path}: {failure.strerror}{fix}") from failure
    except ValueError as failure:
        raise error(f"{path} is not JSON: {failure}{fix}") from failure


def read_records(path: Path) -> list[Record]:
    """Read JSON lines back; a line that is no record is an error that names it."""
    records = []
    try:
        # Not `splitlines`: JSON keeps some of the other line ends that Unicode has as they are.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            records.append(build(Record, json.loads(line), where=f"{path} line {number}"))
        except json.JSONDecodeError as error:
            raise RecipeError(f"{path} line {number} is not JSON: {error}") from error
    return records


@dataclass(frozen=True)
class RunInfo:
    """How a run was made. `recipe`: its text. `started`: ISO 8601. `seconds`: by stage, in order. `memory`: bytes at
    the peak.

    `manifests`: what was merged: folders of outputs, relative to the run folder, or blocks of a manifest as they are
    (`method`, `inputs` with hashes, `heads`, `alignment`, `fit`).
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
    """Read `run.json`; what does not fit is an error that names the file."""
    return build(RunInfo, read_document(path, error=RecipeError), where=str(path))


def write_info(path: Path, info: RunInfo) -> None:
    """Write `run.json` whole or not at all."""
    write_document(path, asdict(info))
