"""Contents of a run folder, tables of what was merged, and formats of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.filesize import decimal

from orthomerge.analysis import diagnosis
from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.core.errors import CheckpointError, summary
from orthomerge.core.table import Cell, Column, Table
from orthomerge.evaluation.comparisons import Comparison
from orthomerge.evaluation.records import INFO, Record, RunInfo, read_info, read_records
from orthomerge.evaluation.scores import read_comparisons, read_notes
from orthomerge.models.manifest import read_manifest

Content = TypeVar("Content")

_HEX = 12  # digits of a hash
_LABELS = 4
_PARTS = (Column("part"), Column("name"), Column("labels"), Column("size", "right"), Column("hash"))
_MERGES = (Column("method"), Column("options", wrap=True), Column("has seen"), Column("hash"))

_Cells = tuple[Cell, ...]


@dataclass(frozen=True)
class RunContents:
    """Contents of a run folder. `merged`: tables of what was merged. `absent`: recorded outputs that do not exist.

    `suite`: empty if none was evaluated. `versions`: of the run, or else of the records.
    """

    name: str
    records: list[Record]
    comparisons: list[Comparison]
    notes: list[str]
    diagnosis: Diagnosis | None
    info: RunInfo
    merged: list[Table]
    absent: list[str]
    suite: str
    versions: Mapping[str, str]


def read_contents(run: Path) -> RunContents:
    """Read a run folder. Only records.jsonl is required; every file that exists must be valid."""
    path = run / "records.jsonl"
    if not path.is_file():
        problem = "has no records.jsonl" if run.is_dir() else "is not a folder"
        raise CheckpointError(f"{run} {problem}; give the run folder that `orthomerge evaluate` wrote")
    records = read_records(path)
    if not records:
        raise CheckpointError(f"{path} is empty: there is nothing to report; evaluate again")
    info = _read(run / INFO, read_info) or RunInfo()
    absent = [entry for entry in info.manifests if isinstance(entry, str) and not (run / entry).is_dir()]
    present = [entry for entry in info.manifests if entry not in absent]
    manifests = [read_manifest(run / entry) if isinstance(entry, str) else entry for entry in present]
    try:
        merged = merged_tables(manifests)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a manifest in {run / INFO} is incomplete ({summary(error)}); run again") from error
    return RunContents(
        run.resolve().name,
        records,
        comparisons=_read(run / "comparisons.json", read_comparisons) or [],
        notes=_read(run / "notes.json", read_notes) or [],
        diagnosis=_read(run / diagnosis.FILE, diagnosis.read_diagnosis),
        info=info,
        merged=merged,
        absent=absent,
        suite=next((record.suite for record in records if record.suite), ""),
        versions=info.versions or {name: text for record in records for name, text in record.versions.items()},
    )


def _read(path: Path, reader: Callable[[Path], Content]) -> Content | None:
    return reader(path) if path.is_file() else None


def merged_tables(manifests: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Make two tables per set of parts: the merged files, and their merges."""
    groups: dict[tuple[str, tuple[_Cells, ...]], dict[_Cells, None]] = {}
    for manifest in manifests:
        key = (manifest.get("family", ""), tuple(_parts(manifest)))
        groups.setdefault(key, {})[_merge(manifest)] = None
    tables = []
    for (family, parts), merges in groups.items():
        title = f"Parts (family {family})" if family else "Parts"
        tables += [Table(title, _PARTS, parts), Table("Merges", _MERGES, tuple(merges))]
    return tables


def _parts(manifest: Mapping[str, Any]) -> Iterator[_Cells]:
    inputs, heads = manifest["inputs"], manifest["heads"]
    parts = {"base": inputs["base"], **{f"expert {task}": expert for task, expert in inputs["experts"].items()}}
    labels = {f"expert {task}": head["labels"] for task, head in heads.items()}
    for role, entry in parts.items():
        names, files = labels.get(role, []), entry["files"]
        ellipsis = f", … ({len(names)})" if len(names) > _LABELS else ""
        yield (
            Cell(role),
            Cell(entry["name"] + (f" @ {entry['revision']}" if entry.get("revision") else "")),
            Cell(", ".join(names[:_LABELS]) + ellipsis),
            Cell(decimal(sum(file["size"] for file in files)) if files else ""),
            Cell(f"{len(files)} files") if len(files) > 1 else _digest(files[0]["hash"] if files else ""),
        )


def _merge(manifest: Mapping[str, Any]) -> _Cells:
    sections = {"fitted": manifest.get("fit"), "aligned": manifest.get("alignment")}
    used = "; ".join(_inputs(verb, facts) for verb, facts in sections.items() if facts)
    method, encoder = manifest["method"], manifest.get("encoder", {})
    texts = (str(method["name"]), listed(method["parameters"]) or "–", used or "no inputs")
    return (*map(Cell, texts), _digest(encoder.get("content", "")))


def _inputs(verb: str, facts: Mapping[str, Any]) -> str:
    counts = [task["inputs"] for task in facts["tasks"].values()]
    number = "–".join(str(count) for count in sorted({min(counts), max(counts)}))
    aligner = f" by {facts['aligner']}" if "aligner" in facts else ""
    return f"{verb}{aligner} on {number} inputs per task from {facts['split']} ({facts['access']})"


def _digest(digest: str) -> Cell:
    return Cell(digest.rpartition(":")[2][:_HEX], digest or None)


def time_of(seconds: float) -> str:
    """Format seconds: `2.5 s` or `0:02:05`."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def listed(values: object) -> str:
    """Format options: `scale = 0.3, density = 0.2`."""
    if isinstance(values, Mapping):
        return ", ".join(f"{name} = {_option(value)}" for name, value in values.items() if value is not None)
    return "" if values is None else str(values)


def _option(value: object) -> str:
    if isinstance(value, Mapping):
        return f"({listed(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def numbers_of(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """Format numbers by name; `x`, `x, low` and `x, high` are joined to `1.5 (1.2 to 1.8)`."""
    rows = []
    for name, value in numbers.items():
        stem, _, end = name.rpartition(", ")
        if end in ("low", "high") and stem in numbers:
            continue
        low, high = numbers.get(f"{name}, low"), numbers.get(f"{name}, high")
        interval = "" if low is None or high is None else f" ({_short(low)} to {_short(high)})"
        rows.append((name, f"{_short(value)}{interval}"))
    return rows


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:#.3g}".removesuffix(".")
