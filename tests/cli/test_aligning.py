"""`align`, `aligners`, `merge` of a recipe that aligns, and `evaluate` of what they wrote, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.aligning import COUNTS, contents
from tests.calling import call, refused

from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.evaluation.scores import read_run
from orthomerge.models.saved import verify_folder

TASKS = ("two", "three")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "cli-cache"))


@pytest.fixture(scope="module")
def out(merged_berts: Path) -> Path:
    return merged_berts


def arguments(tables: Path, out: Path, to: Path) -> list[object]:
    return [
        "align", out, "--out", to, "--device", "cpu", "--quiet",
        *(f"--data={task}={tables / task}.csv" for task in TASKS),
    ]  # fmt: skip


def test_one_line_a_task(berts: Path, tables: Path, out: Path, tmp_path: Path) -> None:
    given = arguments(tables, out, tmp_path / "to")
    lines = call(*given, "--aligner", "ridge", "--limit", 30).stdout.splitlines()
    assert [line.split(";")[0] for line in lines[:2]] == [f"{task}: ridge on 30 inputs of train" for task in TASKS]
    assert all("strength" in line and line.endswith("nothing added") for line in lines[:2])
    assert lines[2] == "note: no data of 'five' was given to align it with; its head is as it was merged"
    assert lines[3] == f"wrote {tmp_path / 'to'}, verified"
    assert "as it was written" in call("inspect", tmp_path / "to", "--verify").stdout
    call("export", tmp_path / "to", "--task", "two", "--out", tmp_path / "two")


def test_options_and_json(berts: Path, tables: Path, out: Path, tmp_path: Path) -> None:
    given = arguments(tables, out, tmp_path / "to")
    more = ["--aligner", "surgery", "--set", "rank=2", "--set", "steps=5", "--seed", 7, "--split", "test", "--json"]
    document = json.loads(call(*given, *more).stdout)
    about = document["manifest"]["alignment"]
    assert document["out"] == str(tmp_path / "to")
    assert (about["options"]["rank"], about["options"]["steps"], about["options"]["seed"]) == (2, 5, 7)
    assert (about["access"], about["tasks"]["two"]["inputs"]) == ("transductive", COUNTS["test"])
    assert about["tasks"]["two"]["extra"]["parameters"] == 2 * 2 * 32
    assert "parameters added" in call(*given[:3], tmp_path / "again", *given[4:], *more[:-1]).stdout
    assert "no place" in refused("export", tmp_path / "to", "--task", "two", "--out", tmp_path / "two", code=2)


def test_mistakes(berts: Path, tables: Path, out: Path, tmp_path: Path) -> None:
    given = arguments(tables, out, tmp_path / "to")
    assert "did you mean 'two'" in refused(*given, "--data", "tow=x.csv", code=2)
    assert "have the same name" in refused(*given, "--data", "two=x.csv", code=2)
    assert "expected --expert TASK=PATH, got 'two'" in refused(*given, "--expert", "two", code=2)
    assert "did you mean 'strength'" in refused(*given, "--aligner", "ridge", "--set", "strenght=1", code=2)
    assert "must be train | val | test" in refused(*given, "--split", "dev", code=2)
    assert not (tmp_path / "to").exists()


def test_progress_is_told(
    berts: Path, tables: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    given = [each for each in arguments(tables, out, tmp_path / "to") if each != "--quiet"]
    text = call(*given, "--aligner", "ridge").stderr
    assert "encoding two" in text
    assert "aligning three by ridge" in text


def test_aligners() -> None:
    documents = json.loads(call("list", "aligners", "--json").stdout)
    assert [document["aligner"] for document in documents] == list(ALIGNERS)
    assert {document["aligner"] for document in documents if document["note"]} == {"surgery", "probsurgery"}
    shown = call("list", "aligners").stdout
    assert "adds parameters" in shown
    assert "strength = auto" in call("list", "aligners", "ridge").stdout
    assert "did you mean 'ridge'" in refused("list", "aligners", "rigde", code=2)


def test_evaluate_says_what_an_aligned_output_has_seen(berts: Path, tables: Path, out: Path, tmp_path: Path) -> None:
    for split, name in (("train", "ridge"), ("test", "surgery")):
        more = ["--set", "steps=5"] if name == "surgery" else []
        given = arguments(tables, out, tmp_path / name)
        call(*given, "--aligner", name, "--split", split, *more)
    call(
        "evaluate", out, tmp_path / "ridge", tmp_path / "surgery", "--out", tmp_path / "run", "--device", "cpu",
        "--protocol", "current", "--protocol", "aligned-c", "--shots", 4, "--seeds", 1,
        *(f"--data={task}={tables / task}.csv" for task in TASKS),
        *(f"--expert={task}={berts / task}" for task in TASKS),
    )  # fmt: skip
    records = read_run(tmp_path / "run").records
    found = {(r.method, r.protocol): (r.access, r.extra_parameters) for r in records if r.task == "two"}
    added = 2 * 16 * 32
    assert found["task_arithmetic", "current"] == ("data-free", 0)
    assert found["task_arithmetic + ridge", "current"] == ("inductive", 0)
    assert found["task_arithmetic + surgery", "current"] == ("transductive", added)
    assert found["task_arithmetic + surgery", "joint"] == ("transductive", 2 * added)
    # Another head takes the place of all that surgery added, but what was seen was seen.
    assert found["task_arithmetic + surgery", "aligned-c"] == ("transductive", 0)
    assert found["task_arithmetic + ridge", "aligned-c"] == ("inductive", 0)


def test_merge_of_a_recipe_that_aligns(berts: Path, tables: Path, tmp_path: Path) -> None:
    (tmp_path / "two.csv").symlink_to(tables / "two.csv")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"base: {berts / 'base'}\nexperts: {{two: {berts / 'two'}, three: {berts / 'three'}}}\nmethod: average\n"
        "align: {aligner: ridge, data: {two: two.csv}}\nout: merged\n"
    )
    planned = call("merge", path, "--dry-run").stdout
    assert "then the heads of two aligned by ridge on inputs of the train split" in planned.replace("\n", " ")
    assert json.loads(call("merge", path, "--json", "--dry-run").stdout)["align"]["tasks"] == ["two"]
    text = call("merge", path, "--quiet").stdout
    assert "two: ridge on 60 inputs of train; strength" in text
    assert "heads: two (2), three (3)" in text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["merged", "recipe.yaml", "two.csv"]
    assert verify_folder(tmp_path / "merged") == []
    broken = path.read_text().replace("two: two.csv", "tow: tow.csv").replace("merged", "other")
    path.write_text(broken)
    document = json.loads(call("merge", path, "--json", "--dry-run", code=2).stdout)
    assert [problem["where"] for problem in document["problems"]] == ["align: data of 'tow'"] * 2
    assert "tow.csv does not exist" in refused("merge", path, code=2)
    assert not (tmp_path / "other").exists()


def test_negate_does_not_align(berts: Path, tables: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"experts: {{two: {berts / 'two'}}}\nalign: {{data: {{two: {tables / 'two.csv'}}}}}\n")
    data = f"two={tables / 'two.csv'}"
    assert "has no use for the section 'align'" in refused("negate", path, "--target", "two", "--data", data, code=2)


def test_the_scale_is_chosen_before_heads_are_aligned(berts: Path, tables: Path, tmp_path: Path) -> None:
    path, expert = tmp_path / "recipe.yaml", Path(shutil.copytree(berts / "two", tmp_path / "two"))
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(berts / "base" / name, expert)
    path.write_text(
        f"base: {berts / 'base'}\nexperts: {{two: {expert}}}\nparameters: {{scale: auto}}\n"
        f"align: {{aligner: ridge, data: {{two: {tables / 'two.csv'}}}}}\nout: merged\n"
    )
    call("merge", path, "--data", f"two={tables / 'two.csv'}", "--quiet")
    manifest = json.loads(contents(tmp_path / "merged")["orthomerge.json"])
    assert 0 < manifest["method"]["parameters"]["scale"] <= 1
    assert manifest["alignment"]["aligner"] == "ridge"
