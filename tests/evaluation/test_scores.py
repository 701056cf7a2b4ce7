"""A run folder holds what was measured and can be read back, with tables by hand; `evaluate` takes names and models."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.aligner_table import aligner_sheets
from tests.analysis.making import CURRENT, PROTOCOLS, Toy

from orthomerge import align, evaluate, merge
from orthomerge.core.errors import CheckpointError, OutputError, RecipeError
from orthomerge.core.version import VERSION
from orthomerge.data.task import Access
from orthomerge.evaluation.evaluate import Subject, score
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Record, read_records, write_records
from orthomerge.evaluation.scores import Scores, compare_run, read_predictions, read_run
from orthomerge.evaluation.tables import TITLES, accuracy_tables, lines


@pytest.fixture(scope="module")
def scores(toy: Toy) -> Scores:
    # Transductive comes first here, but never in a table.
    return score([toy.alone(), toy.average()], PROTOCOLS[::-1], toy.encoded(), suite="toy")


@pytest.fixture(scope="module")
def out(scores: Scores, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scores.write(tmp_path_factory.mktemp("run") / "deep" / "run")


def test_scores_read_back_are_those_that_were_written(scores: Scores, out: Path) -> None:
    assert read_run(out) == scores
    assert compare_run(out) == scores.comparisons
    # The experts and the average were scored under the same seven protocols; joint is the average's alone.
    assert len(scores.comparisons) == len(PROTOCOLS)
    assert (out / "table.md").read_text() == f"{scores.markdown()}\n"
    assert [table.title for table in scores.tables()][:3] == list(TITLES.values())
    assert repr(scores) == f"Scores({len(scores.records)} records of expert, average)"
    assert not list(out.glob(".*"))
    assert len({record.predictions for record in scores.records}) == len(scores.records)
    for record in scores.records:
        assert (record.versions["orthomerge"], record.suite) == (VERSION, "toy")
        answers, kept = read_predictions(out, record), scores.predictions[record.predictions or ""]
        assert np.array_equal(answers.predicted, kept.predicted)
        assert record.value == answers.hits.sum() / answers.scored.sum()


def test_tables_hold_no_markup_from_manifests_or_notes(scores: Scores) -> None:
    """The method's name comes from a manifest, and a note repeats what a file says."""
    records: list[Record] = [replace(record, method="<b>*x*|\x1b[2J") for record in scores.records]
    text = Scores(records, [], ["see [this](http://x) <img>\n# not a title"]).markdown()
    assert not [part for part in ("<b>", "<img>", "\x1b", "[this]") if part in text]
    assert r"| &lt;b&gt;\*x\*\|\\x1b\[2J |" in text
    assert text.endswith(r"- see \[this\](http://x) &lt;img&gt; # not a title")


def test_the_reference_and_the_margin(toy: Toy) -> None:
    scores = score([toy.alone(), toy.average()], [CURRENT], toy.encoded(), against="average", margin=0.9)
    (item,) = scores.comparisons
    assert (item.method, item.reference, item.equivalence.margin) == ("expert", "average", 0.9)


def test_names_of_predictions_and_a_run_that_is_replaced_whole(toy: Toy, scores: Scores, tmp_path: Path) -> None:
    plain = EvaluationProtocol("aligned-c", {"epochs": 1})
    protocols = [plain, replace(plain, options={"epochs": 9}), replace(plain, support="val")]
    subjects = [toy.average(name=name) for name in ("a very long name " * 20, "a/b", "a_b")]
    many = score(subjects, protocols, toy.encoded())
    scores.write(tmp_path)
    many.write(tmp_path)
    names = {record.predictions for record in many.records}
    assert len(names) == len(many.records) == 3 * 2 * 4  # with joint
    assert len(list((tmp_path / "predictions").iterdir())) == len(names)
    assert read_run(tmp_path) == many
    assert compare_run(tmp_path)  # which checks every file against its record


def test_one_model_has_no_comparison_and_notes_are_kept(toy: Toy, tmp_path: Path) -> None:
    tasks = toy.encoded(tasks=toy.with_wrong_labels("where", "val"))
    score([toy.total()], [CURRENT], tasks).write(tmp_path / "run")
    back, table = read_run(tmp_path / "run"), (tmp_path / "run" / "table.md").read_text()
    (note,) = back.notes
    assert "it may have been trained on the test inputs" in note
    assert table.endswith(f"### Notes\n\n- {note}\n")
    assert back.comparisons == []
    assert "Against" not in table


def test_damaged_notes_and_a_folder_that_cannot_be(scores: Scores, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*notes.json: No such file.*; evaluate again"):
        read_run(tmp_path)
    for text, message in (("[", "is not JSON"), ("{}", "must be a list of strings"), ("[1]", "a list of strings")):
        (tmp_path / "notes.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write the run to .*file.*give another folder"):
        scores.write(tmp_path / "file")


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
    model = toy.average().models["where"]
    model.save(tmp_path / "out")
    forms: list[Any] = [model, tmp_path / "out", str(tmp_path / "out"), [model], {"average": model}]
    first, *others = (evaluate(form, toy.tasks, encoding=toy.encoding).records for form in forms)
    assert all(records == first for records in others)
    named = evaluate({"mine": model, "saved": tmp_path / "out"}, toy.tasks, encoding=toy.encoding)
    assert list(by_method(named)) == ["mine", "saved"]
    own = Subject("own", toy.experts.sources)
    mixed = evaluate([model, tmp_path / "out", own], toy.tasks, encoding=toy.encoding)
    assert list(by_method(mixed)) == ["average (average)", "average (out)", "own"]
    # Protocols and aligners by name
    protocols: list[str | EvaluationProtocol] = ["current", "knn", "ridge", EvaluationProtocol("probe", {"steps": 5})]
    scores = evaluate(model, toy.tasks, protocols=protocols, encoding=toy.encoding)
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
    model, twice = toy.average().models["where"], [toy.average(name="x"), toy.average(name="x")]
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


PLAIN = Record("digit", "ties", "current", "accuracy", 0.5, 0.4, 0.6, 10, "data-free")
FULL = Record(
    "zwölf\u2028lines\x85", "ties", "knn", "accuracy", 1.0, 0.7, 1.0, 12, "transductive", split="val", seed=3,
    shots=0.25, support="val", options={"epochs": 2, "lr": None}, aligner="ridge", extra_parameters=96, suite="digits",
    parameters={"scale": [0.1, 0.2], "density": None, "on": True}, predictions="predictions/x.npz",
    versions={"torch": "2"}, inputs={"model": "abc"},
)  # fmt: skip


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
    # A line of an earlier version
    old = {name: value for name, value in asdict(PLAIN).items() if name not in ("support", "options")}
    path.write_text(json.dumps(old) + "\n")
    assert read_records(path) == [PLAIN]


def test_what_makes_another_way() -> None:
    changes: list[dict[str, Any]] = [
        *({"options": {"epochs": epochs, "lr": None}} for epochs in (3, "2")),
        *({"protocol": "probe"}, {"support": "train"}, {"shots": 5}, {"access": "inductive"}, {"aligner": None}),
    ]
    for change in changes:
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
    ("content", "message"),
    [
        ({"acess": "x"}, r"line 2: unknown option 'acess'; did you mean 'access'\?"),
        ({"access": "inductiv"}, r"line 2: 'access' must be .*, got 'inductiv'; did you mean 'inductive'\?"),
        ({"value": "0.5"}, "line 2: 'value' must be number, got '0.5'"),
        (None, r"cannot read .*r: No such file"),
        (b"{}\n", "line 1: 'task' is missing"),
        (b"{", "line 1 is not JSON"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_files_that_are_no_records(content: dict[str, str] | bytes | None, message: str, tmp_path: Path) -> None:
    if isinstance(content, dict):  # changes of the second record
        content = "".join(f"{json.dumps(asdict(PLAIN) | change)}\n" for change in ({}, content)).encode()
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    with pytest.raises((CheckpointError, RecipeError), match=message):
        read_records(tmp_path / "r")


def record(task: str, value: float, *, seed: int = 0, access: Access = "inductive", **more: object) -> Record:
    given = {"method": "ties", "protocol": "knn", "metric": "accuracy", "shots": 5, **more}
    low, high = value - 0.03, value + 0.04
    return Record(task=task, value=value, low=low, high=high, examples=10, access=access, seed=seed, **given)  # type: ignore[arg-type]


SEEDS = [
    record(task, value, seed=seed)
    for task, values in {"a": (0.5, 0.7, 0.9), "b": (0.3, 0.5, 0.1)}.items()
    for seed, value in enumerate(values)
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


MARKDOWN = """\
### Inductive: inputs from train or val, scored on test

| method | protocol | a | b | mean | 95 % | sd | worst | seeds |
|---|---|---:|---:|---:|---:|---:|---:|---:|
| ties | knn, 5/class | 70.0 | 30.0 | 50.0 | 47.9-52.8 | 10.0 | 40.0 | 3 |
| slerp | knn, 5/class |  | 20.0 | 20.0 | 17.0-24.0 |  | 20.0 | 1 |

### Transductive: the test inputs themselves, as most papers do

| method | protocol | a | b | mean | 95 % |
|---|---|---:|---:|---:|---:|
| average | current | 25.0 |  | 25.0 | 22.0-29.0 |"""


def test_markdown() -> None:
    other = record("a", 0.25, access="transductive", method="average", protocol="current", shots=None)
    tables = accuracy_tables([other, *SEEDS, record("b", 0.2, method="slerp")])
    assert "\n\n".join(table.markdown() for table in tables) == MARKDOWN


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
