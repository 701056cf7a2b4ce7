"""A run folder holds what was measured, and can be read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.evaluation.test_evaluate import COUNTS, QUESTIONS, Toy, make_toy

from orthomerge.errors import OutputError
from orthomerge.evaluation.evaluate import Question
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.running import run_evaluation
from orthomerge.evaluation.tables import TITLES
from orthomerge.records import Record, read_records
from orthomerge.version import VERSION


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    out = tmp_path_factory.mktemp("run") / "deep" / "run"
    said: list[str] = []
    subjects = [toy.experts, toy.merged("average", parameters={"weights": None})]
    # Transductive comes first here, but never in a table.
    records = run_evaluation(
        toy.bench(out.parent / "features"), subjects, QUESTIONS[::-1], out=out, suite="toy", say=said.append
    )
    assert said == [f"{len(records)} records in {out}"]
    return out, records


def test_records_read_back_are_those_that_were_made(run: tuple[Path, list[Record]]) -> None:
    out, records = run
    assert read_records(out / "records.jsonl") == records
    assert not list(out.glob(".*"))
    for record in records:
        assert record.versions["orthomerge"] == VERSION
        assert record.suite == "toy"


def test_predictions_are_those_that_were_counted(run: tuple[Path, list[Record]]) -> None:
    out, records = run
    names = [record.predictions for record in records]
    assert len(set(names)) == len(names)
    for record in records:
        assert record.predictions is not None
        predicted = np.load(out / record.predictions)["predicted"]
        truth = np.load(out / "predictions" / f"truth-{record.task}.npz")["labels"]
        assert len(predicted) == len(truth) == COUNTS["test"]
        if record.protocol == "joint" and record.task == "where":
            truth = truth + 3  # after the three labels of `bright`
        kept = predicted != UNSCORED
        assert record.examples == kept.sum()
        assert record.value == (predicted[kept] == truth[kept]).sum() / kept.sum()


def test_one_table_for_each_access_class(run: tuple[Path, list[Record]]) -> None:
    out, _ = run
    text = (out / "table.md").read_text()
    assert [line[4:] for line in text.splitlines() if line.startswith("### ")] == list(TITLES.values())
    tables = dict(zip(TITLES, text.split("### ")[1:], strict=True))
    assert "| average | aligned-c, 50% |" in tables["inductive"]
    assert "(2 seeds) |" in tables["inductive"]
    assert "| average | knn, 2/class |" in tables["inductive"]
    assert "| average | knn, 3/class |" in tables["transductive"]
    assert "current" not in tables["inductive"] + tables["cross-fitted"] + tables["transductive"]
    for table in tables.values():
        assert "| method | protocol | bright | where | mean |" in table


def test_a_name_with_a_slash_and_a_folder_that_cannot_be(toy: Toy, tmp_path: Path) -> None:
    subject = toy.merged("average")
    bench = toy.bench(tmp_path / "features")
    named = type(subject)("mine/best", subject.models)
    for record in run_evaluation(bench, [named], [Question("current")], out=tmp_path / "run"):
        assert record.method == "mine/best"
        assert record.predictions is not None
        assert (tmp_path / "run" / record.predictions).is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write the run to .*file.*give another folder"):
        run_evaluation(bench, [subject], [Question("current")], out=tmp_path / "file")
