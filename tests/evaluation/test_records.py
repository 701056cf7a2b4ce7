"""Records as JSON lines and as tables, by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.aligner_table import aligner_sheets

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.data.task import Access
from orthomerge.evaluation.records import Record, read_records, write_records
from orthomerge.evaluation.tables import accuracy_tables, lines

PLAIN = Record("digit", "ties", "current", "accuracy", 0.5, 0.4, 0.6, 10, "data-free")
FULL = Record(
    task="zwölf\u2028lines\x85",
    method="ties",
    protocol="knn",
    metric="accuracy",
    value=1.0,
    low=0.7,
    high=1.0,
    examples=12,
    access="transductive",
    split="val",
    seed=3,
    shots=0.25,
    support="val",
    options={"epochs": 2, "lr": None},
    parameters={"scale": [0.1, 0.2], "density": None, "on": True},
    aligner="ridge",
    extra_parameters=96,
    predictions="predictions/x.npz",
    suite="digits",
    versions={"torch": "2"},
    inputs={"model": "abc"},
)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [PLAIN, FULL])
    assert read_records(path) == [PLAIN, FULL]
    assert path.read_bytes().count(b"\n") == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["records.jsonl"]
    write_records(path, [])
    assert read_records(path) == []
    for shots in (5, 0.5, None):  # few shots stay whole and shares stay shares
        write_records(path, [replace(PLAIN, shots=shots)])
        (back,) = read_records(path)
        assert (back.shots, type(back.shots)) == (shots, type(shots))


def test_lines_of_an_earlier_version(tmp_path: Path) -> None:
    new = ("support", "options")
    old = {name: value for name, value in asdict(PLAIN).items() if name not in new}
    (tmp_path / "r").write_text(json.dumps(old) + "\n")
    assert read_records(tmp_path / "r") == [PLAIN]


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": "probe"},
        {"options": {"epochs": 3, "lr": None}},
        {"options": {"epochs": "2", "lr": None}},
        {"support": "train"},
        {"shots": 5},
        {"access": "inductive"},
        {"aligner": None},
    ],
)
def test_what_makes_another_way(change: dict[str, Any]) -> None:
    assert replace(FULL, **change).way != FULL.way
    same = replace(FULL, options={"lr": None, "epochs": 2}, seed=7, task="other", method="average", value=0.0)
    assert same.way == FULL.way


@pytest.mark.parametrize(
    ("given", "title"),
    [
        ({}, "knn"),
        ({"shots": 5, "access": "inductive", "support": "train"}, "knn, 5/class"),
        ({"shots": 0.1, "access": "inductive", "support": "val"}, "knn, 10%, from val"),
        ({"access": "transductive", "support": "val"}, "knn, from val"),
        ({"access": "transductive"}, "knn"),  # of an earlier version
        ({"options": {"b": 0.5, "a": "x"}, "aligner": "ridge"}, 'aligner ridge, a="x", b=0.5'),
    ],
)
def test_titles(given: dict[str, Any], title: str) -> None:
    assert replace(PLAIN, protocol="knn", **given).way.title == title


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acess": "x"}, r"line 2: unknown option 'acess'; did you mean 'access'\?"),
        ({"access": "inductiv"}, r"line 2: 'access' must be .*, got 'inductiv'; did you mean 'inductive'\?"),
        ({"value": "0.5"}, "line 2: 'value' must be number, got '0.5'"),
    ],
)
def test_a_line_that_is_no_record(change: dict[str, object], message: str, tmp_path: Path) -> None:
    lines = [json.dumps(asdict(PLAIN)), json.dumps(asdict(PLAIN) | change)]
    (tmp_path / "r").write_text("\n".join(lines) + "\n")
    with pytest.raises(RecipeError, match=message):
        read_records(tmp_path / "r")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*r: No such file"),
        (b"{}\n", "line 1: 'task' is missing"),
        (b"{", "line 1 is not JSON"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_files_that_are_no_records(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    with pytest.raises((CheckpointError, RecipeError), match=message):
        read_records(tmp_path / "r")


def record(task: str, value: float, *, seed: int = 0, access: Access = "inductive", **more: object) -> Record:
    given = {"method": "ties", "protocol": "knn", "metric": "accuracy", "shots": 5, **more}
    low, high = value - 0.03, value + 0.04
    return Record(task=task, value=value, low=low, high=high, examples=10, access=access, seed=seed, **given)  # type: ignore[arg-type]


SEEDS = [
    record("a", 0.5, seed=0),
    record("a", 0.7, seed=1),
    record("a", 0.9, seed=2),
    record("b", 0.3, seed=0),
    record("b", 0.5, seed=1),
    record("b", 0.1, seed=2),
]


def test_mean_spread_and_worst_seed() -> None:
    (line,) = lines(SEEDS)
    assert line.values == pytest.approx({"a": 70, "b": 30})
    assert line.mean == pytest.approx(50)
    # Means of the seeds: 40, 60, 50.
    assert line.worst_seed == pytest.approx(40)
    assert line.spread == pytest.approx(10)
    assert line.seeds == 3
    assert line.way.title == "knn, 5/class"
    # Two tasks, each 3 points down and 4 points up: sqrt(9 + 9) / 2 and sqrt(16 + 16) / 2
    assert (line.low, line.high) == pytest.approx((50 - 18**0.5 / 2, 50 + 32**0.5 / 2))
    (alone,) = lines([record("a", 0.5)])
    assert (alone.low, alone.high) == pytest.approx((47, 54))
    (line,) = lines([record("a", 0.25, shots=0.1), record("b", 0.75, shots=0.1)])
    assert (line.mean, line.worst_seed, line.spread, line.seeds) == (50, 50, None, 1)
    assert line.way.title == "knn, 10%"
    assert lines([record("a", 0.6, metric="calibration")]) == []


def test_markdown() -> None:
    other = record("a", 0.25, access="transductive", method="average", protocol="current", shots=None)
    tables = accuracy_tables([other, *SEEDS, record("b", 0.2, method="slerp")])
    assert "\n\n".join(table.markdown() for table in tables) == "\n".join(
        (
            "### Inductive: inputs from train or val, scored on test",
            "",
            "| method | protocol | a | b | mean | 95 % | sd | worst | seeds |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
            "| ties | knn, 5/class | 70.0 | 30.0 | 50.0 | 47.9-52.8 | 10.0 | 40.0 | 3 |",
            "| slerp | knn, 5/class |  | 20.0 | 20.0 | 17.0-24.0 |  | 20.0 | 1 |",
            "",
            "### Transductive: the test inputs themselves, as most papers do",
            "",
            "| method | protocol | a | b | mean | 95 % |",
            "|---|---|---:|---:|---:|---:|",
            "| average | current | 25.0 |  | 25.0 | 22.0-29.0 |",
        )
    )


AVERAGE = Record("one", "average", "current", "accuracy", 0.5, 0, 1, 100, "data-free")
RIDGE = replace(AVERAGE, access="inductive", aligner="ridge", shots=5)


def test_the_table_of_aligners_by_hand() -> None:
    records = [replace(AVERAGE, task=task) for task in ("one", "other")]
    for seed, values in enumerate(((0.6, 0.8), (0.5, 0.7))):
        pairs = zip(("one", "other"), values, strict=True)
        records += [replace(RIDGE, task=task, value=value, seed=seed) for task, value in pairs]
    (sheet,) = aligner_sheets(records)
    assert sheet.title == "average, inductive"
    assert sheet.names == ("aligner", "extra parameters", "5 a class")
    assert sheet.texts == (("none", "0", "50.0"), ("ridge", "0", "65.0 ± 7.1 (2)"))
