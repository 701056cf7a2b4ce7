"""A run folder: records as JSON lines, every prediction, and the tables made of them.

RUN/records.jsonl          one line a measurement
RUN/predictions/*.npz      what was predicted for every test input, and the truth
RUN/table.md               the table, one for each access class
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from orthomerge.errors import OutputError
from orthomerge.evaluation.evaluate import Bench, Question, Subject, evaluate
from orthomerge.evaluation.tables import markdown
from orthomerge.records import Record, write_records
from orthomerge.version import VERSION

__all__ = ["run_evaluation"]


def run_evaluation(
    bench: Bench,
    subjects: Sequence[Subject],
    questions: Sequence[Question],
    *,
    out: Path,
    suite: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure everything and write the run folder; predictions are kept, so that any two rows can be compared later."""
    import torch

    folder = out / "predictions"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write the run to {out}: {error.strerror}; give another folder") from error
    versions = {"orthomerge": VERSION, "torch": torch.__version__}
    records: list[Record] = []
    for record, predicted in evaluate(bench, subjects, questions, suite=suite):
        shots = "all" if record.shots is None else f"{record.shots:g}"
        name = f"{record.method}-{record.task}-{record.protocol}-{record.access}-{shots}-{record.seed}.npz"
        name = name.replace("/", "_")
        np.savez_compressed(folder / name, predicted=predicted.numpy().astype(np.int16))
        records.append(replace(record, predictions=f"predictions/{name}", versions=versions))
    for task in bench.tasks:
        labels = bench.tasks[task]["test"].labels
        if labels is not None:
            np.savez_compressed(folder / f"truth-{task}.npz", labels=labels.astype(np.int16))
    write_records(out / "records.jsonl", records)
    (out / "table.md").write_text(markdown(records) + "\n", encoding="utf-8")
    say(f"{len(records)} records in {out}")
    return records
