"""Records of an evaluation with their predictions, notes and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.version import VERSION
from orthomerge.evaluation.comparisons import MARGIN, Comparison, Predictions, compare_records
from orthomerge.evaluation.evaluate import evaluate
from orthomerge.evaluation.notes import contamination_notes
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.running import Run, prediction_name, write_run

if TYPE_CHECKING:
    from orthomerge.core.table import Table
    from orthomerge.evaluation.encoded import EncodedTasks
    from orthomerge.evaluation.protocol import EvaluationProtocol
    from orthomerge.evaluation.subject import Subject


@dataclass(frozen=True, eq=False)
class Scores:
    """`predictions`: by the name that a record has for them, which is their file once they are written.

    `against`: the reference of the comparisons, else the best mean; `margin`: below it two methods may be comparable.
    """

    records: list[Record]
    predictions: Mapping[str, Predictions]
    notes: list[str]
    against: str | None = None
    margin: float = MARGIN

    def __repr__(self) -> str:
        names = list(dict.fromkeys(record.method for record in self.records))
        return f"Scores({len(self.records)} records of {', '.join(names)})"

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Each method against a reference, from the predictions."""
        return compare_records(self.records, self.predictions_of, against=self.against, margin=self.margin)

    @property
    def run(self) -> Run:
        """What is written of it beside predictions."""
        return Run(self.records, self.comparisons, self.notes)

    def predictions_of(self, record: Record) -> Predictions:
        """What a record was counted from."""
        return self.predictions[record.predictions or ""]

    def tables(self) -> list[Table]:
        """Accuracies by access class, then comparisons."""
        return self.run.tables()

    def write(self, out: str | Path) -> Path:
        """Write a run folder: records, predictions, comparisons, notes and tables."""
        write_run(Path(out), self.run, self.predictions)
        return Path(out)


def score(
    subjects: Sequence[Subject],
    protocols: Sequence[EvaluationProtocol],
    encoded: EncodedTasks,
    *,
    suite: str | None = None,
    against: str | None = None,
    margin: float = MARGIN,
) -> Scores:
    """Score all subjects, and look for what would make a reader doubt the scores."""
    names = [subject.name for subject in subjects]
    if against is not None and against not in names:
        raise RecipeError(f"there is no model {against!r} to compare with; {nearest(against, names)}")
    if not margin > 0:
        raise RecipeError(f"'margin' must be positive, got {margin}")
    versions = {"orthomerge": VERSION, "torch": torch.__version__}
    records, predictions = list[Record](), dict[str, Predictions]()
    for item in evaluate(subjects, protocols, encoded, suite=suite):
        each = Predictions(item.predicted.numpy().astype(np.int32), item.truth.numpy().astype(np.int32))
        name = prediction_name(item.record, each)
        predictions[name] = each
        records.append(replace(item.record, predictions=name, versions=versions))
    return Scores(records, predictions, contamination_notes(encoded), against, margin)
