"""A run folder: files of others that have our names are refused by name, and nothing of theirs is removed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from orthomerge.core.errors import OutputError
from orthomerge.evaluation.comparisons import Predictions
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.scores import FILES, drop_stale, put_records
from orthomerge.files.folders import (
    EXPERT,
    EXPORT,
    MANIFEST,
    RUN,
    check_claim,
    claim,
    claimed,
    drop,
    existing_files,
    write_marker,
)

PREDICTIONS = Predictions(np.zeros(2, np.int32), np.ones(2, np.int32))


def record(name: str) -> Record:
    return Record("a", "ties", "current", "accuracy", 0.5, 0.4, 0.6, 10, "data-free", predictions=name)


@pytest.mark.parametrize("name", [*FILES, "predictions/a.npz", "diagnosis.json"])
def test_a_file_of_somebody_else_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("years of work")
    with pytest.raises(OutputError, match=f"{tmp_path / name} was not written by orthomerge, so it is not replaced"):
        claim(tmp_path, ["other.json", name])
    assert (tmp_path / name).read_text() == "years of work"
    assert not (tmp_path / RUN).exists()


def test_records_replace_ours_and_predictions_of_others_stay(tmp_path: Path) -> None:
    put_records(tmp_path, [record("predictions/a.npz")], {"predictions/a.npz": PREDICTIONS})
    (tmp_path / "predictions" / "thesis.npz").write_text("years of work")
    (tmp_path / "notes.txt").write_text("years of work")
    put_records(tmp_path, [record("predictions/b.npz")], {"predictions/b.npz": PREDICTIONS})
    assert (tmp_path / "predictions" / "a.npz").exists()  # until nobody can ask for it
    drop_stale(tmp_path, [record("predictions/b.npz")])
    assert sorted(path.name for path in (tmp_path / "predictions").iterdir()) == ["b.npz", "thesis.npz"]
    assert existing_files(tmp_path) == {"records.jsonl", "predictions/b.npz"}
    assert (tmp_path / "notes.txt").read_text() == "years of work"
    with pytest.raises(OutputError, match=r"thesis.npz was not written by orthomerge"):
        put_records(tmp_path, [], {"predictions/thesis.npz": PREDICTIONS})
    drop(tmp_path, ["predictions/thesis.npz"])
    assert (tmp_path / "predictions" / "thesis.npz").read_text() == "years of work"


@pytest.mark.parametrize("older", [False, True])
def test_a_failure_takes_away_what_is_new(tmp_path: Path, older: bool) -> None:
    run = tmp_path / "deep" / "run"
    if older:
        claim(run, ["old"])
        (run / "old").touch()

    def fail() -> None:
        with claimed(run, ["old", "sub/new"]):
            (run / "sub").mkdir()
            (run / "sub" / "new").touch()
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["deep", "old", RUN, "run"] if older else [])
    if older:
        assert json.loads((run / RUN).read_text()) == {"format": 1, "kind": "evaluation", "files": ["old"]}


@pytest.mark.parametrize("marker", [MANIFEST, EXPORT, EXPERT])
@pytest.mark.parametrize("below", ["", "sub/run"])
def test_a_model_is_no_run_folder(tmp_path: Path, marker: str, below: str) -> None:
    write_marker(tmp_path, marker)
    with pytest.raises(OutputError, match=f"{tmp_path} is a model that orthomerge wrote"):
        check_claim(tmp_path / below, FILES)


@pytest.mark.parametrize("text", ["[]", '{"format": 1}', "years of work"])
def test_a_list_that_is_none_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN).write_text(text)
    with pytest.raises(OutputError, match=f"{RUN} is not a valid list of a run folder; move it away"):
        claim(tmp_path, FILES)
    assert (tmp_path / RUN).read_text() == text


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "predictions").symlink_to(tmp_path / "far")
    with pytest.raises(OutputError, match=r"run/predictions is a link, and nothing is written through links"):
        put_records(run, [], {"predictions/a.npz": PREDICTIONS})
    assert not list((tmp_path / "far").iterdir())
