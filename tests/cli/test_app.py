"""Public names, merges and what is written of them, what is listed, and progress."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.calling import call, refused

import orthomerge
from orthomerge.alignment.aligners import ALIGNERS
from orthomerge.cli.printing import show, shown
from orthomerge.core.progress import Progress
from orthomerge.core.table import Table, number
from orthomerge.evaluation.protocols import PROTOCOLS
from orthomerge.merging.methods import FITTED, METHODS
from orthomerge.models.families import FAMILIES
from orthomerge.suites.table import SUITES


def words_for(berts: Path, *names: str) -> list[object]:
    return ["merge", *(berts / name for name in names or ("two", "three")), "--base", berts / "base"]


def test_the_public_names_are_those_listed() -> None:
    for name in orthomerge.__all__:
        assert getattr(orthomerge, name) is not None
    assert dir(orthomerge) == sorted(orthomerge.__all__)
    packages = {path.parent.name for path in Path(orthomerge.__file__).parent.glob("*/__init__.py")}
    assert packages.isdisjoint(orthomerge.__all__)  # importing the package would replace the public name by it
    verbs = "merge open load align evaluate diagnose negate analogy finetune export push inspect report run list"
    assert set(verbs.split()) <= set(orthomerge.__all__)
    with pytest.raises(AttributeError, match="no attribute 'mergge'"):
        orthomerge.mergge  # noqa: B018


def test_merge_inspect_export(berts: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "out", words_for(berts)
    text = call(*words, "--out", out, "--method", "ties", "--set", "density=0.5", "--set", "scale=0.8").stdout
    assert "heads: two (2), three (3)" in text
    assert json.loads((out / "orthomerge.json").read_text())["method"]["parameters"] == {"density": 0.5, "scale": 0.8}
    assert "as it was written" in call("inspect", out, "--verify").stdout
    assert json.loads(call("inspect", berts / "three", "--json").stdout)["labels"] == ["three-0", "three-1", "three-2"]
    assert "sha256" not in call("inspect", berts / "three", "--headers").stdout
    described = json.loads(call("inspect", out, "--json").stdout)
    assert (described["problems"], described["tasks"]["two"]["stock_class"]) == ([], "BertForSequenceClassification")
    assert "--verify reads every file" in refused("inspect", out, "--verify", "--headers", code=2)
    assert json.loads(call("export", out, "--task", "two", "-o", tmp_path / "two", "--json").stdout)["task"] == "two"
    assert (tmp_path / "two/config.json").exists()
    assert "did you mean 'two'" in refused("export", out, "--task", "tow", "--out", tmp_path / "x", code=2)
    assert "has one head" in refused("export", out, "--all-heads", "--out", tmp_path / "x", code=2)
    (out / "README.md").write_text("another")
    assert "README.md has 7 bytes" in refused("inspect", out, "--verify", code=5)


def test_experts_are_called_after_their_folders_or_as_named(berts: Path, tmp_path: Path) -> None:
    words = ["merge", f"tone={berts / 'two'}", berts / "three", "--base", berts / "base", "--method", "average"]
    assert "heads: tone (2), three (3)" in call(*words, "--out", tmp_path / "out").stdout
    assert "two experts have the name 'three'" in refused(*words, f"three={berts / 'two'}", code=2)


def test_a_recipe_and_the_command_line_which_wins(berts: Path, tmp_path: Path) -> None:
    (tmp_path / "two").symlink_to(berts / "two")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: {berts / 'base'}\nexperts:\n  two: two\n  three: {{path: {berts / 'three'}, labels: [x, y, z]}}\n"
        "method: task_arithmetic\nparameters:\n  scale: {two: 0.5, three: 0.1}\nout: merged\n"
    )
    call("merge", recipe)
    manifest = json.loads((tmp_path / "merged/orthomerge.json").read_text())
    assert manifest["method"]["parameters"] == {"scale": [0.5, 0.1]}
    assert manifest["heads"]["three"]["labels"] == ["x", "y", "z"]
    document = json.loads(call("merge", recipe, tmp_path / "other", "--method", "average", "--json").stdout)
    assert document["out"] == str(tmp_path / "other")
    assert document["manifest"]["method"] == {"name": "average", "parameters": {"weights": None}}
    assert "there are two outputs" in refused("merge", recipe, "a", "--out", "b", code=2)
    assert "at most one output folder, got a, b" in refused("merge", recipe, "a", "b", code=2)


def test_data_may_be_a_folder(berts: Path, tables: Path, tmp_path: Path) -> None:
    words = [*words_for(berts), "--method", "regmean", "--device", "cpu", "--limit", 8, "--quiet"]
    call(*words, "--data", tables, "--out", tmp_path / "folder")
    call(*words, *(f"--data={name}={tables / name}.csv" for name in ("two", "three")), "--out", tmp_path / "paths")
    first, second = (tmp_path / name / "encoder.safetensors" for name in ("folder", "paths"))
    assert first.read_bytes() == second.read_bytes()
    assert "has no file or folder named after a task" in refused(*words, "--data", tmp_path, code=3)
    assert "is not a folder" in refused(*words, "--data", "nowhere", code=3)
    (tmp_path / "two.csv").touch()
    (tmp_path / "two").mkdir()
    assert "are both named after 'two'" in refused(*words, "--data", tmp_path, code=2)


def test_a_dry_run_lists_all_problems_at_once(berts: Path, tmp_path: Path) -> None:
    words = [*words_for(berts), "--dry-run"]
    more = [f"gone={tmp_path / 'gone'}", "--method", "tise", "--out", tmp_path, "--json"]
    document = json.loads(call(*words, *more, code=2).stdout)
    assert [problem["where"] for problem in document["problems"]] == ["method", "expert 'gone'", "out"]
    assert all(problem["fix"] for problem in document["problems"])
    assert "what to do" in call(*words, *more[:-1], code=2).stdout
    shown = call(*words, "--method", "ties", "--out", tmp_path / "out").stdout
    assert "39 tensors merged" in shown
    assert "no problems" in shown
    assert not (tmp_path / "out").exists()
    exists = json.loads(call(*words, "--method", "average", "--out", tmp_path, "--json", code=5).stdout)
    assert "exists already" in exists["problems"][0]["what"]


@pytest.mark.parametrize(
    ("kind", "column", "names", "one"),
    [
        ("methods", "method", [*METHODS, *FITTED], r"density +number +0\.2"),
        ("aligners", "aligner", ALIGNERS, "strength .* auto"),
        ("protocols", "protocol", PROTOCOLS, "smallest mean distance"),
        ("families", "family", FAMILIES, "model types +list of text +bert"),
        ("suites", "suite", SUITES, "tasks .* digit, parity"),
    ],
)
def test_list(kind: str, column: str, names: object, one: str) -> None:
    rows = json.loads(call("list", kind, "--json").stdout)
    assert [row[column] for row in rows] == list(names)  # type: ignore[call-overload]
    assert all(row["title"] for row in rows)
    entry = {"methods": "ties", "aligners": "ridge", "protocols": "knn", "families": "bert", "suites": "digits"}[kind]
    assert re.search(one.lower(), call("list", kind, entry).stdout.lower())
    assert f"did you mean {entry!r}" in refused("list", kind, f"{entry}s", code=2)


def test_what_entries_are_marked_as() -> None:
    marks = {row["method"]: row["note"] for row in json.loads(call("list", "methods", "--json").stdout)}
    assert [name for name, note in marks.items() if note == "needs inputs"] == list(FITTED)
    marks = {row["aligner"]: row["note"] for row in json.loads(call("list", "aligners", "--json").stdout)}
    assert {name for name, note in marks.items() if note} == {"surgery", "probsurgery"}


OPTIONS = Table.of(
    "", ("name", "options", "n"), (("one", "alpha beta gamma delta", "123456"),), left=2, wrap=("options",)
)


@pytest.mark.parametrize(
    ("table", "width", "lines"),
    [
        (
            Table.of(
                "Scores & \u202e", ("method", "mean", "n"), [("ties", number(84.04), 2), ("a", None, 1_000)], note="N"
            ),
            80,
            ["", r"Scores & \u202e", "method  mean     n", "ties    84.0     2", "a             1000", "N"],
        ),
        (
            Table.of("", ("label", "n"), (("日本", 1), ("cafe\u0301", 2))),
            80,
            ["label  n", "日本   1", "cafe\u0301   2"],
        ),
        (OPTIONS, 80, ["name  options                      n", "one   alpha beta gamma delta  123456"]),
        (OPTIONS, 28, ["name  options              n", "one   alpha beta      123456", "      gamma delta"]),
        # A column that wraps is no narrower than twelve letters, and nothing is cut.
        (OPTIONS, 5, ["name  options            n", "one   alpha beta    123456", "      gamma delta"]),
    ],
)
def test_tables_on_a_terminal(
    table: Table, width: int, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show(table)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == lines


def test_progress_on_a_terminal_and_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(report: Progress) -> str:
        report.begin("merge", place=1, count=2)
        report.stage("merging", 10_000_000)
        report.advance(10_000_000)
        report.end("merge", place=1, count=2, seconds=1.25, found=False)
        report.end("evaluate", place=2, count=2, seconds=0, found=True)
        return capsys.readouterr().err

    with shown(quiet=False) as report:
        lines = work(report).splitlines()
    assert lines[:3] == ["[1/2] merge", "[1/2] merge: merging 10 MB", "[1/2] merge: done in 1.2 s"]
    with shown(quiet=True) as report:
        assert work(report) == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown(quiet=False) as report:
        assert "[2/2] evaluate: found, unchanged" in work(report)
