"""A run folder as a report needs it: records, and whatever else is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orthomerge.analysis import diagnosis as diagnoses
from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.core.errors import CheckpointError
from orthomerge.evaluation import run_info as runinfo
from orthomerge.evaluation.comparisons import Comparison
from orthomerge.evaluation.records import Record, read_records
from orthomerge.evaluation.run_info import RunInfo
from orthomerge.evaluation.running import read_comparisons, read_notes
from orthomerge.models.manifest import read_manifest


@dataclass(frozen=True)
class Material:
    """`manifests`: blocks by the place they came from; `absent`: outputs that run.json names and that are gone."""

    name: str
    records: list[Record]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    info: RunInfo | None = None
    manifests: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()


def read_material(run: Path) -> Material:
    """Read a run folder. Only records.jsonl must be there; what is there must be sound."""
    if not run.is_dir():
        raise CheckpointError(f"{run} is not a folder; give the run folder that `orthomerge evaluate` wrote")
    path = run / "records.jsonl"
    if not path.is_file():
        raise CheckpointError(f"{run} has no records.jsonl; give the run folder that `orthomerge evaluate` wrote")
    records = read_records(path)
    if not any(record.metric == "accuracy" for record in records):
        held = "is empty" if not records else "holds no accuracy"
        raise CheckpointError(f"{path} {held}: there is nothing to report; evaluate again")
    info = runinfo.read_info(run / runinfo.FILE) if (run / runinfo.FILE).is_file() else None
    manifests, absent = _manifests(run, info)
    return Material(
        run.resolve().name,
        records,
        comparisons=read_comparisons(run / "comparisons.json") if (run / "comparisons.json").is_file() else [],
        notes=read_notes(run / "notes.json") if (run / "notes.json").is_file() else [],
        diagnosis=diagnoses.read_diagnosis(run / diagnoses.FILE) if (run / diagnoses.FILE).is_file() else None,
        info=info,
        manifests=manifests,
        absent=absent,
    )


def _manifests(run: Path, info: RunInfo | None) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
    found: dict[str, Mapping[str, Any]] = {}
    absent = []
    for number, given in enumerate(info.manifests if info else (), 1):
        if isinstance(given, Mapping):
            found[f"merge {number}"] = given
        elif (run / given).is_dir():
            found[given] = read_manifest(run / given)
        else:
            absent.append(given)
    return found, tuple(absent)
