"""Records of an evaluation with predictions, notes and comparisons, in memory and as a run folder.

RUN/orthomerge-run.json    names of our files: no others are replaced or removed
RUN/records.jsonl          one line per score
RUN/predictions/*.npz      predicted and true classes of every test input, in the same label space
RUN/comparisons.json       comparison of each method with a reference, from the predictions
RUN/notes.json             warnings about the scores
RUN/table.md               one table per access class, comparisons, notes
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from orthomerge.core.errors import CheckpointError, IncompatibleError, OutputError
from orthomerge.core.schema import build
from orthomerge.core.table import Table, markdown_escape
from orthomerge.evaluation.comparisons import MARGIN, Comparison, Predictions, compare_records, comparison_tables
from orthomerge.evaluation.records import Record, read_document, read_records, write_document, write_records
from orthomerge.evaluation.tables import accuracy_tables
from orthomerge.files.folders import check_claim, claimed, drop, existing_files
from orthomerge.files.publish import check_room
from orthomerge.files.replacing import remove_file, replace_file

RECORDS = "records.jsonl"
DERIVED = ("comparisons.json", "notes.json", "table.md")
FILES = (RECORDS, *DERIVED)
_FOLDER = "predictions"
_MOST_BYTES = 150  # of a file's name, before its digest


@dataclass(frozen=True)
class Scores:
    """Records, comparisons of each method with a reference, and notes: warnings about the scores.

    `predictions`: by `Record.predictions`, their file in a run folder; empty for scores that were read from one.
    """

    records: list[Record]
    comparisons: list[Comparison]
    notes: list[str]
    predictions: Mapping[str, Predictions] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        names = dict.fromkeys(record.method for record in self.records)
        return f"Scores({len(self.records)} records of {', '.join(names)})"

    def tables(self) -> list[Table]:
        return [*accuracy_tables(self.records), *comparison_tables(self.comparisons)]

    def markdown(self) -> str:
        parts = [table.markdown() for table in self.tables()]
        if self.notes:
            parts.append("\n".join(("### Notes", "", *(f"- {markdown_escape(note)}" for note in self.notes))))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "records": [asdict(record) for record in self.records],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "notes": self.notes,
        }

    def write(self, out: str | Path) -> Path:
        """Write a run folder: records, predictions, comparisons, notes and tables."""
        out = Path(out)
        try:
            put_records(out, self.records, self.predictions)
            replace_file(out / "table.md", f"{self.markdown()}\n".encode())
            write_document(out / "comparisons.json", [asdict(comparison) for comparison in self.comparisons])
            write_document(out / "notes.json", self.notes)
            drop_stale(out, self.records)
        except OSError as error:
            raise OutputError(f"cannot write the run to {out}: {error.strerror}; give another folder") from error
        return out


def check_run(out: Path) -> None:
    """Refuse a folder into which no run can be written."""
    check_claim(out, FILES)
    check_room(Path(os.path.abspath(out)), 0)


def put_records(out: Path, records: Sequence[Record], predictions: Mapping[str, Predictions]) -> None:
    """Write predictions, then the records that name them; a failure removes the new files.

    Files derived from earlier records are removed first, so that a reader cannot take them for files of this run.
    """
    with claimed(out, [*FILES, *predictions]):
        put_predictions(out, predictions)
        for derived in DERIVED:
            remove_file(out / derived)
        write_records(out / RECORDS, records)


def put_predictions(out: Path, predictions: Mapping[str, Predictions]) -> None:
    (out / _FOLDER).mkdir(exist_ok=True)
    for name, arrays in predictions.items():
        data = BytesIO()
        np.savez_compressed(data, predicted=arrays.predicted, truth=arrays.truth)
        replace_file(out / name, data.getvalue())


def drop_stale(out: Path, records: Iterable[Record]) -> None:
    """Remove our predictions that no record names any more."""
    current = {record.predictions for record in records}
    drop(out, [name for name in existing_files(out) if name.startswith(f"{_FOLDER}/") and name not in current])


def read_run(folder: Path) -> Scores:
    notes = read_notes(folder / "notes.json")
    return Scores(read_records(folder / RECORDS), read_comparisons(folder / "comparisons.json"), notes)


def read_comparisons(path: Path) -> list[Comparison]:
    items = read_document(path, fix="; compare the run again")
    if not isinstance(items, list):
        raise CheckpointError(f"{path} must be a list of comparisons, got {type(items).__name__}; compare again")
    return [build(Comparison, item, where=f"{path} item {number}") for number, item in enumerate(items, 1)]


def read_notes(path: Path) -> list[str]:
    notes = read_document(path, fix="; evaluate again")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise CheckpointError(f"{path} must be a list of strings; evaluate again")
    return notes


def compare_run(folder: Path, *, against: str | None = None, margin: float = MARGIN) -> list[Comparison]:
    """Compare the methods of a run folder from its predictions; see `compare_records`."""
    records = read_records(folder / RECORDS)
    predictions = {str(record.predictions): read_predictions(folder, record) for record in records}
    return compare_records(records, predictions, against=against, margin=margin)


def read_predictions(folder: Path, record: Record) -> Predictions:
    """Read the predictions of a record and check that they give its value."""
    if record.predictions is None:
        raise CheckpointError(
            f"{folder / RECORDS} names no predictions of {record.method!r} on {record.task!r}; evaluate again"
        )
    path = folder / record.predictions
    try:
        with path.open("rb") as handle, np.load(handle) as file:
            if "truth" not in file:
                raise CheckpointError(f"{path} must have an array 'truth', got none; evaluate again with this version")
            predicted, truth = (np.asarray(file[name], dtype=np.int32) for name in ("predicted", "truth"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; evaluate again") from error
    except (ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged: {error}; evaluate again") from error
    if predicted.ndim != 1 or predicted.shape != truth.shape:
        raise CheckpointError(f"{path} is damaged: {predicted.shape} predictions, {truth.shape} labels; evaluate again")
    predictions = Predictions(predicted, truth)
    count, hits = int(predictions.scored.sum()), int(predictions.hits.sum())
    if count != record.examples or hits != round(record.value * count):
        raise IncompatibleError(
            f"{path} holds {hits} hits of {count} inputs, but {RECORDS} has {record.value:.4f} of "
            f"{record.examples}; the folder was partly overwritten; evaluate again"
        )
    return predictions


def prediction_name(record: Record, predictions: Predictions) -> str:
    """Return the file name of a record's predictions: readable, and unique by its digest."""
    content = hashlib.sha256(predictions.predicted.tobytes() + predictions.truth.tobytes()).hexdigest()
    key = json.dumps([record.method, record.task, record.seed, asdict(record.way), content])
    shots = "all" if record.shots is None else f"{record.shots:g}"
    parts = [record.method, record.task, record.protocol, record.access, record.support, shots]
    text = "-".join(part for part in parts if part is not None).replace("/", "_")
    start = text.encode()[:_MOST_BYTES].decode(errors="ignore")
    return f"{_FOLDER}/{start}-{record.seed}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.npz"
