"""Records as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.evaluation.records import Record, read_records, write_records

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
