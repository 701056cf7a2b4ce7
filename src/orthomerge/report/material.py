"""A run folder as a report needs it: records, and whatever else is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orthomerge.analysis import diagnosis
from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.core.errors import CheckpointError
from orthomerge.evaluation.comparisons import Comparison
from orthomerge.evaluation.records import INFO, Record, RunInfo, read_info, read_records
from orthomerge.evaluation.scores import read_comparisons, read_notes
from orthomerge.models.manifest import read_manifest

Content = TypeVar("Content")


@dataclass(frozen=True)
class Material:
    """`manifests`: what was merged; `absent`: outputs that run.json names and that no longer exist."""

    name: str
    records: list[Record]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    info: RunInfo | None = None
    manifests: list[Mapping[str, Any]] = field(default_factory=list)
    absent: tuple[str, ...] = ()

    @property
    def suite(self) -> str:
        """The suite that was evaluated; empty if there was none."""
        return next((record.suite for record in self.records if record.suite), "")

    @property
    def versions(self) -> dict[str, str]:
        """Of the run, else of the records."""
        if self.info and self.info.versions:
            return dict(self.info.versions)
        return {name: version for record in self.records for name, version in record.versions.items()}


def read_material(run: Path) -> Material:
    """Read a run folder. Only records.jsonl is required; every file that exists must be valid."""
    path = run / "records.jsonl"
    if not path.is_file():
        what = "has no records.jsonl" if run.is_dir() else "is not a folder"
        raise CheckpointError(f"{run} {what}; give the run folder that `orthomerge evaluate` wrote")
    records = read_records(path)
    if not any(record.headline for record in records):
        content = "holds no accuracy" if records else "is empty"
        raise CheckpointError(f"{path} {content}: there is nothing to report; evaluate again")
    info = _read(run / INFO, read_info)
    manifests: list[Mapping[str, Any]] = []
    absent = []
    for entry in info.manifests if info else ():
        if isinstance(entry, Mapping):
            manifests.append(entry)
        elif (run / entry).is_dir():
            manifests.append(read_manifest(run / entry))
        else:
            absent.append(entry)
    return Material(
        run.resolve().name,
        records,
        comparisons=_read(run / "comparisons.json", read_comparisons) or [],
        notes=_read(run / "notes.json", read_notes) or [],
        diagnosis=_read(run / diagnosis.FILE, diagnosis.read_diagnosis),
        info=info,
        manifests=manifests,
        absent=tuple(absent),
    )


def _read(path: Path, reader: Callable[[Path], Content]) -> Content | None:
    return reader(path) if path.is_file() else None
