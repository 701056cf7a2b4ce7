"""A run folder: records as JSON lines, every prediction, and what can be said of them.

RUN/records.jsonl          one line a measurement
RUN/predictions/*.npz      what was predicted for every test input, and the truth, in the same label space
RUN/comparisons.json       each method against a reference, from the predictions
RUN/notes.json             what would make a reader doubt the numbers
RUN/table.md               the tables: one for each access class, comparisons, notes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orthomerge.checkpoints.replacing import replace_file
from orthomerge.core.table import Table, markdown_escape
from orthomerge.errors import OutputError, RecipeError, nearest
from orthomerge.evaluation.comparisons import (
    MARGIN,
    Comparison,
    compare_run,
    comparison_tables,
    read_comparisons,
)
from orthomerge.evaluation.evaluate import Bench, Question, Subject, evaluate, truth_of
from orthomerge.evaluation.notes import contamination_notes, read_notes
from orthomerge.evaluation.tables import accuracy_tables
from orthomerge.records import Record, read_records, write_records, write_whole
from orthomerge.version import VERSION

__all__ = ["Run", "read_run", "run_evaluation"]

Ints = NDArray[np.int32]

_MOST_BYTES = 150  # of a file's name, before its digest


@dataclass(frozen=True)
class Run:
    """What a run folder says."""

    records: list[Record]
    comparisons: list[Comparison]
    notes: list[str]

    def tables(self) -> list[Table]:
        """Accuracies by access class, then comparisons."""
        return [*accuracy_tables(self.records), *comparison_tables(self.comparisons)]

    def markdown(self) -> str:
        """All tables, then the notes."""
        parts = [table.markdown() for table in self.tables()]
        if self.notes:
            parts.append("\n".join(("### Notes", "", *(f"- {markdown_escape(note)}" for note in self.notes))))
        return "\n\n".join(parts)


def run_evaluation(
    bench: Bench,
    subjects: Sequence[Subject],
    questions: Sequence[Question],
    *,
    out: Path,
    suite: str | None = None,
    against: str | None = None,
    margin: float = MARGIN,
    say: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure everything and write the run folder; predictions are kept, so that any two rows can be compared later.

    `against`: the reference of the comparisons, else the best mean; `margin`: below it two methods may be comparable.
    """
    import torch

    by_name = {subject.name: subject for subject in subjects}
    if against is not None and against not in by_name:
        raise RecipeError(f"there is no subject {against!r} to compare with; {nearest(against, by_name)}")
    if not margin > 0:
        raise RecipeError(f"'margin' must be positive, got {margin}")
    versions = {"orthomerge": VERSION, "torch": torch.__version__}
    with _writing(out) as keep:
        records: list[Record] = []
        for record, predicted in evaluate(bench, subjects, questions, suite=suite):
            truth = truth_of(bench, by_name[record.method], record).numpy().astype(np.int32)
            name = keep(record, predicted.numpy().astype(np.int32), truth)
            records.append(replace(record, predictions=name, versions=versions))
        notes = contamination_notes(bench)
        # Whoever reads the folder before all of it is new finds a file missing, not one of another run.
        for derived in ("notes.json", "comparisons.json", "table.md"):
            (out / derived).unlink(missing_ok=True)
        write_records(out / "records.jsonl", records)
    comparisons = compare_run(out, against=against, margin=margin)
    write_whole(out / "table.md", Run(records, comparisons, notes).markdown() + "\n")
    _write_json(out / "comparisons.json", [asdict(comparison) for comparison in comparisons])
    _write_json(out / "notes.json", notes)
    say(f"{len(records)} records in {out}")
    return records


@contextmanager
def _writing(out: Path) -> Iterator[Callable[[Record, Ints, Ints], str]]:
    """`keep(record, predicted, truth)`: the name of a file with them, which no other predictions have.

    So a run that was there stays whole until its records are replaced; then its predictions go. A run that fails takes
    away its own.
    """
    folder, kept, before = out / "predictions", list[str](), set[str]()
    new = [each for each in (folder, *folder.parents) if not each.exists()]

    def keep(record: Record, predicted: Ints, truth: Ints) -> str:
        kept.append(_file_name(record, predicted, truth))
        if kept[-1] not in before:
            data = BytesIO()
            np.savez_compressed(data, predicted=predicted, truth=truth)
            replace_file(folder / kept[-1], data.getvalue())
        return f"predictions/{kept[-1]}"

    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before.update(path.name for path in folder.glob("*.npz"))
        except OSError as error:
            raise OutputError(f"cannot write the run to {out}: {error.strerror}; give another folder") from error
        yield keep
    except BaseException:
        for name in set(kept) - before:
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        for each in new:
            with suppress(OSError):
                each.rmdir()
        raise
    for name in before - set(kept):
        (folder / name).unlink(missing_ok=True)


def read_run(folder: Path) -> Run:
    """A run folder, read back."""
    notes = read_notes(folder / "notes.json")
    return Run(read_records(folder / "records.jsonl"), read_comparisons(folder / "comparisons.json"), notes)


def _file_name(record: Record, predicted: Ints, truth: Ints) -> str:
    """Readable, and never that of another record or of other predictions: options and odd letters are in the digest."""
    said = hashlib.sha256(predicted.tobytes() + truth.tobytes()).hexdigest()
    key = json.dumps([record.method, record.task, record.seed, asdict(record.way), said])
    shots = "all" if record.shots is None else f"{record.shots:g}"
    parts = [record.method, record.task, record.protocol, record.access, record.support, shots]
    shown = "-".join(part for part in parts if part is not None).replace("/", "_")
    shown = shown.encode()[:_MOST_BYTES].decode(errors="ignore")
    return f"{shown}-{record.seed}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.npz"


def _write_json(path: Path, document: object) -> None:
    write_whole(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
