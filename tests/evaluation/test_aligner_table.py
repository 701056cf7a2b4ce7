"""The table of all aligners: a cell is the mean over tasks, then over draws."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.aligner_table import aligner_sheets

from orthomerge.evaluation.records import Record

PLAIN = Record("one", "average", "current", "accuracy", 0.5, 0, 1, 100, "data-free")
RIDGE = replace(PLAIN, access="inductive", aligner="ridge", shots=5)


def test_cells_by_hand() -> None:
    records = [replace(PLAIN, task=task) for task in ("one", "other")]
    for seed, values in enumerate(((0.6, 0.8), (0.5, 0.7))):
        pairs = zip(("one", "other"), values, strict=True)
        records += [replace(RIDGE, task=task, value=value, seed=seed) for task, value in pairs]
    (sheet,) = aligner_sheets(records)
    assert sheet.title == "average, inductive"
    assert sheet.names == ("aligner", "extra parameters", "5 a class")
    assert sheet.texts == (("none", "0", "50.0"), ("ridge", "0", "65.0 ± 7.1 (2)"))
