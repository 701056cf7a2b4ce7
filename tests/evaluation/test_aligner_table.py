"""The table of all aligners: nothing is left out of it, and a cell is the mean over tasks, then over draws."""

from __future__ import annotations

from benchmarks.aligner_table import MERGES, aligner_protocols, aligner_sheets

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.evaluation.records import Record


def test_every_aligner_is_asked_everything() -> None:
    asked = {
        (protocol.aligner, protocol.access, protocol.shots, subject): protocol.seeds
        for protocol in aligner_protocols()
        if protocol.aligner is not None
        for subject in protocol.models or ()
    }
    for aligner in ALIGNERS:
        for access in ("inductive", "transductive"):
            for subject in MERGES:
                draws = [asked[aligner, access, shots, subject] for shots in (1, 5, 20, 0.1)]
                assert draws == [20, 20, 20, 5]
    assert asked["probsurgery", "inductive", None, "ties"] == 5, "with all inputs a seed still decides"
    assert asked["ridge", "inductive", None, "ties"] == 1
    assert ("ridge", "inductive", None, "base") in asked, "the control"


def test_a_gpu_is_asked_where_it_helps() -> None:
    options = {(protocol.aligner, protocol.shots): protocol.options for protocol in aligner_protocols(device="cuda")}
    assert options["orth-m", 5] == options["orth-m", None] == options["kl-map", None] == {"device": "cuda"}
    assert options["ridge", None] == options["kl-map", 5] == {}


def test_cells_by_hand() -> None:
    def record(task: str, value: float, seed: int = 0, aligner: str | None = "ridge") -> Record:
        return Record(
            task,
            "average",
            "current",
            "accuracy",
            value,
            0,
            1,
            100,
            "data-free" if aligner is None else "inductive",
            seed=seed,
            aligner=aligner,
            shots=None if aligner is None else 5,
        )

    records = [record(task, 0.5, aligner=None) for task in ("one", "other")]
    records += [record("one", 0.6), record("other", 0.8), record("one", 0.5, seed=1), record("other", 0.7, seed=1)]
    (sheet,) = aligner_sheets(records)
    assert sheet.title == "average, inductive"
    assert sheet.names == ("aligner", "extra parameters", "5 a class")
    assert sheet.texts == (("none", "0", "50.0"), ("ridge", "0", "65.0 ± 7.1 (2)"))
