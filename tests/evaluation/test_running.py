"""A run folder holds what was measured, and can be read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.analysis.making import COUNTS, Toy
from tests.evaluation.making import CURRENT, PROTOCOLS, average, encoded, experts, total, with_wrong_labels

from orthomerge.core.errors import CheckpointError, OutputError, RecipeError
from orthomerge.core.version import VERSION
from orthomerge.evaluation.evaluate import Subject, score
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Record, read_records
from orthomerge.evaluation.scores import Scores, compare_run, read_run
from orthomerge.evaluation.tables import TITLES


def measured(toy: Toy, subjects: list[Subject], protocols: Sequence[EvaluationProtocol], **more: Any) -> Scores:
    return score(subjects, protocols, encoded(toy), **more)


@pytest.fixture(scope="module")
def scores(toy: Toy) -> Scores:
    # Transductive comes first here, but never in a table.
    return measured(toy, [experts(toy), average(toy)], PROTOCOLS[::-1], suite="toy")


@pytest.fixture(scope="module")
def run(scores: Scores, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    return scores.write(tmp_path_factory.mktemp("run") / "deep" / "run"), scores.records


def test_records_read_back_are_those_that_were_made(run: tuple[Path, list[Record]]) -> None:
    out, records = run
    assert read_records(out / "records.jsonl") == records
    assert not list(out.glob(".*"))
    for record in records:
        assert record.versions["orthomerge"] == VERSION
        assert record.suite == "toy"


def test_predictions_are_those_that_were_counted(run: tuple[Path, list[Record]]) -> None:
    out, records = run
    assert len({record.predictions for record in records}) == len(records)
    for record in records:
        with np.load(out / (record.predictions or "")) as file:
            predicted, truth = file["predicted"], file["truth"]
        kept = predicted != UNSCORED
        assert len(predicted) == len(truth) == COUNTS["test"]
        assert (record.examples, record.value) == (kept.sum(), (predicted == truth)[kept].sum() / kept.sum())


def test_one_table_for_each_access_class(run: tuple[Path, list[Record]]) -> None:
    out, _ = run
    text = (out / "table.md").read_text()
    titles = [line[4:] for line in text.splitlines() if line.startswith("### ")]
    assert titles[:3] == list(TITLES.values())
    assert all(title.startswith("Against ") for title in titles[3:])
    assert titles[3:]
    tables = dict(zip(TITLES, text.split("### ")[1:4], strict=True))
    assert "| average | aligned-c, epochs=2, 50% |" in tables["inductive"]
    assert "| mean | 95 % | sd | worst | seeds |" in tables["inductive"]
    assert "| average | knn, 2/class |" in tables["inductive"]
    assert "| average | knn, 3/class |" in tables["transductive"]
    assert "current" not in tables["inductive"] + tables["transductive"]
    for table in tables.values():
        assert "| method | protocol | bright | where | mean | 95 % |" in table


def test_comparisons_are_those_of_the_folder(run: tuple[Path, list[Record]]) -> None:
    out, records = run
    found = read_run(out)
    assert found.records == records
    assert found.comparisons == compare_run(out)
    # The experts and the average were scored under the same seven protocols; joint is the average's alone.
    assert len(found.comparisons) == len(PROTOCOLS)
    assert {frozenset((item.method, item.reference)) for item in found.comparisons} == {
        frozenset(("expert", "average"))
    }
    current = next(item for item in found.comparisons if item.way.protocol == "current")
    assert (current.method, current.reference) == ("average", "expert")
    means = {
        method: np.mean([r.value for r in records if (r.method, r.protocol) == (method, "current")])
        for method in ("average", "expert")
    }
    assert current.difference.estimate == pytest.approx(means["average"] - means["expert"])
    assert (out / "table.md").read_text() == found.markdown() + "\n"


def test_tables_hold_no_markup_from_manifests_or_notes(run: tuple[Path, list[Record]]) -> None:
    """The method's name comes from a manifest, and a note repeats what a file says."""
    records = [replace(record, method="<b>*x*|\x1b[2J") for record in run[1]]
    text = Scores(records, [], ["see [this](http://x) <img>\n# not a title"]).markdown()
    assert not [part for part in ("<b>", "<img>", "\x1b", "[this]") if part in text]
    assert r"| &lt;b&gt;\*x\*\|\\x1b\[2J |" in text
    assert text.endswith(r"- see \[this\](http://x) &lt;img&gt; # not a title")


def test_scores_are_the_same_before_they_are_written(scores: Scores, run: tuple[Path, list[Record]]) -> None:
    assert read_run(run[0]) == scores
    for record in scores.records:
        answers = scores.predictions[record.predictions or ""]
        assert record.value == answers.hits.sum() / answers.scored.sum()
    assert repr(scores) == f"Scores({len(scores.records)} records of expert, average)"


def test_the_reference_and_the_margin(toy: Toy) -> None:
    subjects = [experts(toy), average(toy)]
    (found,) = measured(toy, subjects, [CURRENT], against="average", margin=0.9).comparisons
    assert (found.method, found.reference, found.equivalence.margin) == ("expert", "average", 0.9)
    with pytest.raises(RecipeError, match=r"there is no model 'averag' to compare with; did you mean 'average'\?"):
        measured(toy, subjects, [CURRENT], against="averag")
    with pytest.raises(RecipeError, match="'margin' must be positive, got 0"):
        measured(toy, subjects, [CURRENT], margin=0)


def test_one_model_is_compared_with_nobody(toy: Toy, tmp_path: Path) -> None:
    measured(toy, [total(toy)], [CURRENT]).write(tmp_path / "run")
    assert read_run(tmp_path / "run").comparisons == []
    assert "Against" not in (tmp_path / "run" / "table.md").read_text()


def test_protocols_that_differ_in_options_or_support_have_files_of_their_own(toy: Toy, tmp_path: Path) -> None:
    plain = EvaluationProtocol("aligned-c", {"epochs": 1})
    protocols = [plain, replace(plain, options={"epochs": 9}), replace(plain, support="val")]
    subjects = [average(toy, name=name) for name in ("a very long name " * 20, "a/b", "a_b")]
    records = measured(toy, subjects, protocols)
    records.write(tmp_path / "run")
    names = {record.predictions for record in records.records}
    assert len(names) == len(records.records) == 3 * 2 * 4  # with joint
    assert len(list((tmp_path / "run" / "predictions").iterdir())) == len(names)
    compare_run(tmp_path / "run")  # which checks every file against its record


def test_a_run_is_replaced_whole(toy: Toy, scores: Scores, tmp_path: Path) -> None:
    scores.write(tmp_path)
    few = measured(toy, [total(toy)], [CURRENT])
    few.write(tmp_path)
    assert read_run(tmp_path) == few
    assert len(list((tmp_path / "predictions").iterdir())) == len(few.records)


def test_notes_are_kept(toy: Toy, tmp_path: Path) -> None:
    tasks = encoded(toy, tasks=with_wrong_labels(toy, "where", "val"))
    score([experts(toy)], [CURRENT], tasks).write(tmp_path / "run")
    (note,) = json.loads((tmp_path / "run" / "notes.json").read_text())
    assert "it may have been trained on the test inputs" in note
    assert read_run(tmp_path / "run").notes == [note]
    assert (tmp_path / "run" / "table.md").read_text().endswith(f"### Notes\n\n- {note}\n")


def test_notes_that_are_none(run: tuple[Path, list[Record]], tmp_path: Path) -> None:
    out, _ = run
    assert read_run(out).notes == []
    with pytest.raises(CheckpointError, match=r"cannot read .*notes.json: No such file.*; evaluate again"):
        read_run(tmp_path)
    for text, message in (("[", "is not JSON"), ("{}", "must be a list of strings"), ("[1]", "a list of strings")):
        (tmp_path / "notes.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_run(tmp_path)


def test_a_name_with_a_slash_and_a_folder_that_cannot_be(toy: Toy, tmp_path: Path) -> None:
    scores = measured(toy, [average(toy, name="mine/best")], [CURRENT])
    scores.write(tmp_path / "run")
    for record in scores.records:
        assert record.method == "mine/best"
        assert record.predictions is not None
        assert (tmp_path / "run" / record.predictions).is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write the run to .*file.*give another folder"):
        scores.write(tmp_path / "file")
