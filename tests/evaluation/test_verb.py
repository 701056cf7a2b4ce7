"""The verb `evaluate`: names, paths and models in, scores out; experts are opened again only if they are needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.making import Toy
from tests.evaluation.making import average

from orthomerge.alignment.align import align
from orthomerge.api.evaluate import evaluate
from orthomerge.api.merge import merge
from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.evaluation.evaluate import Subject
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.scores import Scores


def by_method(scores: Scores, **wanted: Any) -> dict[str, list[Record]]:
    records: dict[str, list[Record]] = {}
    for record in scores.records:
        if all(getattr(record, key) == value for key, value in wanted.items()):
            records.setdefault(record.method, []).append(record)
    return records


def test_models_in_memory_and_no_folder(toy: Toy) -> None:
    merged = merge(toy.experts, method="task_arithmetic", scale=1.0)
    aligned = align(merged, toy.tasks, aligner="ridge", encoding=toy.encoding)
    scores = evaluate([merged, aligned], toy.tasks, encoding=toy.encoding)
    records = by_method(scores, protocol="current")
    assert list(records) == ["task_arithmetic", "task_arithmetic + ridge"]
    assert [record.access for record in records["task_arithmetic + ridge"]] == ["inductive"] * 2
    assert {record.inputs["model"] for record in scores.records} == {merged.digest}  # they share the encoder
    assert len(scores.comparisons) == 0  # of two access classes
    assert scores.tables()[0].title == "No inputs used"


def test_one_model_and_several_by_name(toy: Toy, tmp_path: Path) -> None:
    model = average(toy).models["where"]
    model.save(tmp_path / "out")
    forms: list[Any] = [model, tmp_path / "out", str(tmp_path / "out"), [model], {"average": model}]
    first, *others = (evaluate(form, toy.tasks, encoding=toy.encoding).records for form in forms)
    assert all(records == first for records in others)
    named = evaluate({"mine": model, "saved": tmp_path / "out"}, toy.tasks, encoding=toy.encoding)
    assert list(by_method(named)) == ["mine", "saved"]
    own = Subject("own", toy.experts.sources)
    mixed = evaluate([model, tmp_path / "out", own], toy.tasks, encoding=toy.encoding)
    assert list(by_method(mixed)) == ["average (average)", "average (out)", "own"]


def test_protocols_and_aligners_by_name(toy: Toy) -> None:
    protocols: list[str | EvaluationProtocol] = ["current", "knn", "ridge", EvaluationProtocol("probe", {"steps": 5})]
    scores = evaluate(average(toy).models["where"], toy.tasks, protocols=protocols, encoding=toy.encoding)
    said = [(record.protocol, record.aligner) for record in scores.records if record.task == "where"]
    assert said == [("current", None), ("knn", None), ("current", "ridge"), ("probe", None), ("joint", None)]


def test_references(toy: Toy) -> None:
    model = merge(toy.experts, method="average")
    scores = evaluate(model, toy.tasks, references=("expert", "base"), against="base", encoding=toy.encoding)
    assert list(by_method(scores)) == ["base", "expert", "average"]
    assert {item.reference for item in scores.comparisons} == {"base"}
    other = evaluate(model, toy.tasks, references=("expert",), experts=toy.experts, encoding=toy.encoding)
    assert by_method(other)["expert"] == by_method(scores)["expert"]
    one = evaluate(model, {"where": toy.tasks["where"]}, references=("expert",), encoding=toy.encoding)
    assert {record.task for record in one.records} == {"where"}


def test_a_saved_model_opens_its_experts_again(toy: Toy, tmp_path: Path) -> None:
    model = merge(toy.experts, method="average")
    model.save(tmp_path / "out")
    options: dict[str, Any] = {"protocols": ("aligned-c",), "references": ("base",), "encoding": toy.encoding}
    saved = evaluate(tmp_path / "out", toy.tasks, **options)
    assert saved.records == evaluate(model, toy.tasks, **options).records
    # Who moved them says where they are; what needs no expert does not ask.
    shutil.copytree(toy.folder / "where", tmp_path / "moved")
    (tmp_path / "out" / "orthomerge.local.json").unlink()
    assert evaluate(tmp_path / "out", toy.tasks, encoding=toy.encoding).records
    with pytest.raises(CheckpointError, match="the expert of 'bright' was not found"):
        evaluate(tmp_path / "out", toy.tasks, **options)
    places = {"bright": toy.folder / "bright", "where": tmp_path / "moved"}
    moved = evaluate(tmp_path / "out", toy.tasks, experts=places, base=toy.folder / "base", **options)
    assert moved.records == saved.records


def test_what_cannot_be_scored(toy: Toy) -> None:
    probe = EvaluationProtocol("probe", {"stepps": 5})
    model, twice = average(toy).models["where"], [average(toy, name="x"), average(toy, name="x")]
    cases: list[tuple[Any, Any, Any, str]] = [
        ("/nowhere", toy.tasks, [probe], "unknown option 'stepps'"),
        ("/nowhere", toy.tasks, [], "'protocols' is empty"),
        ([], toy.tasks, ["current"], "there is no model to score"),
        ([3], toy.tasks, ["current"], "must be a Model or the path of a saved one, got int"),
        (twice, toy.tasks, ["current"], r"2 models are called 'x \(x\)'; give each a name of its own"),
        (model, {"wher": toy.tasks["where"]}, ["current"], r"no task 'wher'; did you mean 'where'"),
    ]
    for models, data, protocols, message in cases:
        with pytest.raises(RecipeError, match=message):
            evaluate(models, data, protocols=protocols, encoding=toy.encoding)
    with pytest.raises(CheckpointError, match="is not an orthomerge output"):
        evaluate(toy.folder / "where", toy.tasks)
