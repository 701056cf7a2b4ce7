"""`diagnose` from end to end on models that are made in a moment: in Python, and from the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.analysis.making import Toy, task_with
from tests.calling import call, refused

from orthomerge import Model, diagnose, evaluate, merge
from orthomerge.analysis.detail import Detail
from orthomerge.analysis.diagnosis import Diagnosis, Lines, Points, read_diagnosis, write_diagnosis
from orthomerge.api.open import open as open_experts
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.scale import ScaleSearch
from orthomerge.fitting.fit import fit
from orthomerge.merging.merge import MergedTensors
from orthomerge.models.features import FeatureCache
from orthomerge.suites import digits
from orthomerge.suites.digits import digit_tasks
from orthomerge.suites.table import build_suite
from orthomerge.tuning.settings import Tuning

QUICK = Detail(points=20, layers=16, maps=40)


PLAIN = replace(QUICK, points=0, layers=0)


def merged(toy: Toy) -> Model:
    return merge(toy.experts, "task_arithmetic", scale=1.0)


def diagnosed(toy: Toy, *, model: Model | None = None, tasks: Any = None, **options: Any) -> Diagnosis:
    data = toy.tasks if tasks is None else tasks
    return diagnose(model or merged(toy), data, **{"detail": QUICK, "encoding": toy.encoding, **options})


@pytest.fixture(scope="module")
def found(toy: Toy) -> Diagnosis:
    search = ScaleSearch("accuracy", {0.5: dict.fromkeys(toy.tasks, 80.0), 1.0: dict.fromkeys(toy.tasks, 70.0)})
    return diagnosed(toy, scales=search)


def by_key(found: Diagnosis) -> dict[str, Any]:
    return {figure.key: figure for figure in found.figures}


def test_everything_is_there(found: Diagnosis, toy: Toy, tmp_path: Path) -> None:
    assert found.method == "task_arithmetic"
    assert found.tasks == tuple(toy.tasks)
    figures = by_key(found)
    assert list(figures) == [
        "accuracy", "tsne-bright", "tsne-where", "families-accuracy", "families-distance", "families-kl",
        "families-by-task", "cosine", "coefficient", "cosine-by-task", "cka-layers", "cka-experts", "vector-norms",
        "vector-cosines", "sign-conflicts", "vector-ranks", "scale",
    ]  # fmt: skip
    assert found.facts["left_out"] == {}
    assert found.facts["inputs"]["bright"] == {"aligner": 45, "maps": 40}
    titles = [finding.title for finding in found.verdict]
    assert titles[0] == "Accuracy"
    assert {"Which task suffers", "Which experts conflict", "Scale"} <= set(titles)
    assert {"expert", "merged", "aligned", "base", "lost"} <= found.verdict[0].numbers.keys()
    points, accuracy, layers = figures["tsne-where"], figures["accuracy"], figures["cka-layers"]
    assert [view.name for view in points.views] == ["expert", "merged", "aligned"]
    assert points.classes == ("top", "middle", "bottom")
    assert {len(points.true), len(points.images), *(len(view.predicted) for view in points.views)} == {20}
    assert points.images[0].startswith("data:image/png;base64,")
    assert "t-SNE of 20 of 37 test inputs" in points.caption
    assert f"({accuracy.series[0].values[1]:.1f} %)" in points.views[0].title
    assert layers.rows == ("embeddings", "layer 0", "layer 1", "features")
    assert all(math.isnan(value) for value in layers.values[0])  # [CLS] starts as the same for all
    assert all(value <= 1 + 1e-9 for row in layers.values[1:] for value in row)
    assert figures["cka-experts"].rows == ("bright", "where", "task_arithmetic")
    # Written and read back.
    write_diagnosis(tmp_path / "one.json", found)
    back = read_diagnosis(tmp_path / "one.json")
    assert back.verdict == found.verdict
    assert by_key(back)["tsne-bright"] == by_key(found)["tsne-bright"]
    write_diagnosis(tmp_path / "other.json", back)
    assert (tmp_path / "other.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_a_seed_decides_and_a_merge_is_computed_once(toy: Toy, found: Diagnosis, tmp_path: Path) -> None:
    with patch.object(MergedTensors, "blocks", autospec=True, side_effect=MergedTensors.blocks) as blocks:
        again = diagnosed(toy, encoding=replace(toy.encoding, cache=FeatureCache(tmp_path / "features")))
    assert blocks.call_count == 1
    assert by_key(again)["tsne-bright"] == by_key(found)["tsne-bright"]
    assert again.verdict[:3] == found.verdict[:3]
    other = diagnosed(toy, detail=replace(QUICK, seed=1, layers=0, limit=12))
    assert by_key(other)["tsne-bright"] != by_key(found)["tsne-bright"]
    assert other.facts["limit"] == 12
    assert other.facts["inputs"] == {task: {"aligner": 12, "maps": 12} for task in toy.tasks}


def test_a_saved_model_is_diagnosed_as_the_one_in_memory(toy: Toy, found: Diagnosis, tmp_path: Path) -> None:
    merged(toy).save(tmp_path / "out")
    before = sorted(path for path in tmp_path.rglob("*"))
    saved = diagnose(tmp_path / "out", toy.tasks, detail=QUICK, encoding=toy.encoding)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    figures = by_key(found)
    assert all(figure == figures[key] for key, figure in by_key(saved).items() if key not in ("cka-layers", "scale"))
    assert saved.verdict[:3] == found.verdict[:3]


def test_an_expert_is_as_good_as_itself(toy: Toy) -> None:
    own: Any = {"model": toy.experts.teacher("where"), "tasks": {"where": toy.tasks["where"]}}
    found = diagnosed(toy, **own, experts=toy.experts, detail=replace(QUICK, points=0))
    assert found.facts["left_out"] == {}
    assert "That is a tie" in found.verdict[0].text
    figures = by_key(found)
    assert figures["cka-layers"].values[-1] == pytest.approx((1,))
    assert figures["cka-experts"].rows == ("where", "expert")
    assert figures["cosine-by-task"].series[0].values == pytest.approx((1,))
    assert not any(isinstance(figure, Points) for figure in found.figures)


def test_heads_that_read_the_encoder_in_different_ways(toy: Toy) -> None:
    heads = {task: replace(head, pooling=way) for (task, head), way in zip(toy.experts.heads.items(), ("cls", "mean"))}  # noqa: B905
    model = merged(toy).with_heads(heads)
    layers = by_key(diagnosed(toy, model=model, detail=replace(QUICK, points=0)))
    assert layers["cka-experts"].rows == ("bright", "where", "task_arithmetic")
    assert "'cls, mean'" in layers["cka-layers"].caption


def test_records_are_witnesses(toy: Toy, tmp_path: Path) -> None:
    protocols = [EvaluationProtocol("current"), *(EvaluationProtocol("knn", shots=n, seeds=2) for n in (1, 4))]
    how: dict[str, Any] = {"experts": toy.experts, "references": ("base", "expert"), "encoding": toy.encoding}
    scores = evaluate({"another name": merged(toy)}, toy.tasks, protocols=protocols, **how)
    found = diagnosed(toy, detail=replace(PLAIN, probe=False), records=scores.records)
    shots = by_key(found)["shots"]
    assert isinstance(shots, Lines)
    assert [curve.name for curve in shots.curves] == ["knn (inductive)", "as it is", "expert"]
    assert "base" in found.verdict[0].numbers
    remains = [finding for finding in found.verdict if "knn, 4/class" in finding.numbers]
    assert remains or {"Nothing certain remains", "Little to win back"} & {finding.title for finding in found.verdict}


def test_a_fitted_merge_tells_of_its_fit(toy: Toy) -> None:
    options = {"steps": 4, "look": 2, "batch": 4, "options": {"scale": 0.5}}
    model = fit(toy.experts, "moma", toy.tasks, options, device="cpu", encoding=toy.encoding)
    found = diagnosed(toy, model=model, detail=PLAIN)
    figures = by_key(found)
    assert {"masking", "fit-loss"} <= figures.keys()
    masked = model.origin.facts["fit"]["facts"]["masked"]
    assert f"{100 * masked:.1f} % in all" in figures["masking"].caption
    assert found.facts["access"] == "inductive"
    assert "as it is" in figures["families-accuracy"].groups


def test_what_is_missing_is_said(toy: Toy) -> None:
    test = {task: replace(each, splits={"test": each["test"]}) for task, each in toy.tasks.items()}
    alone = open_experts({"where": toy.folder / "where"}, base=toy.folder / "base")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tasks": test}, "'bright' must have a train or val split, .*, got a test split alone"),
        ({"experts": alone}, "task 'bright' needs its expert, which was not given"),
        ({"tasks": {"dark": toy.tasks["bright"]}}, "data of 'dark', but no task of that name"),
        ({"tasks": {}}, "there is no data"),
    ]
    for options, message in cases:
        with pytest.raises(RecipeError, match=message):
            diagnosed(toy, **options)
    with pytest.raises(RecipeError, match="unknown aligner 'ridges'; did you mean 'ridge'"):
        Detail(aligner="ridges")
    with pytest.raises(RecipeError, match="'maps' must be at least 1, got 0"):
        Detail(maps=0)
    # Val stands in for train and needs no labels.
    tasks = {
        name: replace(task, splits={"val": task["val"].unlabelled(), "test": task["test"]})
        for name, task in toy.tasks.items()
    }
    found = diagnosed(toy, tasks=tasks, detail=PLAIN)
    assert found.facts["fitted_on"] == "val"
    assert [series.name for series in by_key(found)["accuracy"].series] == ["expert", "merged", "aligned", "base"]
    assert "Fitted on val inputs" in by_key(found)["families-kl"].caption


def test_three_test_inputs_are_too_few_for_pictures_and_without_a_base_there_are_no_vectors(toy: Toy) -> None:
    tasks = {name: task_with(task, "test", task["test"].take(range(3))) for name, task in toy.tasks.items()}
    experts = open_experts({task: toy.folder / task for task in toy.tasks})
    found = diagnosed(toy, model=merge(experts, "average"), tasks=tasks)
    few = dict.fromkeys(("t-SNE of bright", "t-SNE of where"), "3 test inputs are fewer than 5")
    others = {"CKA": "'bright' has fewer than 4 test inputs", "task vectors": "the base was not given"}
    assert found.facts["left_out"] == {**few, **others}


@pytest.fixture
def texts(merged_berts: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What `diagnose` is given: a merge of tiny BERTs, and data of two of its tasks."""
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    data = [word for name in ("two", "three") for word in ("--data", f"{name}={tables / name}.csv")]
    return ["diagnose", merged_berts, "--device", "cpu", "--batch", 8, *data, "--out", tmp_path / "run"]


def test_from_the_command_line(texts: list[object], tmp_path: Path) -> None:
    text = call(*texts, "--scales").stdout
    assert "Accuracy" in text
    assert "figures and their numbers are in" in text
    found = read_diagnosis(tmp_path / "run" / "diagnosis.json")
    assert found.method == "task_arithmetic"
    figures = by_key(found)
    assert {"scale", "sign-conflicts", "cka-layers"} <= figures.keys()
    assert figures["tsne-two"].texts
    document = json.loads(call(*texts, "--json", "--points", 0, "--layers", 0, "--aligner", "ridge").stdout)
    assert document["verdict"][0]["title"] == "Accuracy"
    assert document["run"] == str(tmp_path / "run")
    assert read_diagnosis(tmp_path / "run" / "diagnosis.json").facts["aligner"] == "ridge"


def test_a_suite_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {name: task for name, task in digit_tasks().items() if name in ("parity", "size")}
    monkeypatch.setattr(digits, "digit_tasks", lambda: dict(small))
    for name, value in list(vars(digits).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(digits, name, replace(value, steps=3))
    given = ["--suite", "digits", "--folder", tmp_path / "suite", "--device", "cpu", "--points", 30, "--layers", 16]
    text = call("diagnose", *given, "--method", "ties:density: 0.5", "--out", tmp_path / "one").stdout
    assert "Which experts conflict" in text
    one = read_diagnosis(tmp_path / "one" / "diagnosis.json")
    suite = build_suite("digits", folder=tmp_path / "suite", device="cpu")
    out = tmp_path / "out"
    suite.merged("ties", {"density": 0.5}).save(out)
    call("diagnose", out, *given, "--out", tmp_path / "other", "--limit", 100)
    other = read_diagnosis(tmp_path / "other" / "diagnosis.json")
    assert one.method == other.method == "ties"
    assert one.verdict[0].numbers["merged"] == other.verdict[0].numbers["merged"]
    assert other.facts["inputs"]["size"] == {"aligner": 100, "maps": 100}
    assert "did you mean 'ties'" in refused("diagnose", *given, "--method", "tiess", code=2)


def test_what_the_command_line_refuses(texts: list[object], berts: Path, tables: Path, tmp_path: Path) -> None:
    merge({"two": berts / "two"}, "average").save(tmp_path / "out")
    without_base = ["diagnose", tmp_path / "out", "--data", f"two={tables / 'two.csv'}"]
    (tmp_path / "file").write_text("")
    cases: list[tuple[str, int, list[object]]] = [
        ("give a suite, or the folder", 2, ["diagnose", "--out", tmp_path / "run"]),
        ("is not the one that the model was made from", 4, [*texts, "--expert", f"three={berts / 'five'}"]),
        ("give --base too", 2, [*without_base, "--scales"]),
        ("cannot write the diagnosis", 5, [*texts[:-1], tmp_path / "file" / "run"]),
    ]
    for message, code, words in cases:
        assert message in refused(*words, code=code)
