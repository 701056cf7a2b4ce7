"""The command line: what it prints, and with which code it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import orthomerge
from orthomerge.cli.app import app
from orthomerge.core.errors import OrthomergeError
from orthomerge.merging.methods import FITTED, METHODS

HEAVY = ("torch", "transformers", "numpy", "yaml", "huggingface_hub", "safetensors", "rich.progress")


def call(*arguments: str, code: int = 0) -> str:
    """Run a command in this process; our errors surface as they do for `main`."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, OrthomergeError):
        assert result.exception.exit_code == code
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.output


def options(berts: Path, *, out: Path | None = None, names: tuple[str, ...] = ("two", "three")) -> list[str]:
    given = ["--base", str(berts / "base"), *(str(berts / name) for name in names)]
    return given + (["--out", str(out)] if out else [])


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from orthomerge.cli.app import app
try:
    app(["--help"])
except SystemExit as done:
    assert done.code == 0
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Merge fine-tuned classifiers" in done.stdout
    assert done.stderr.strip() == "[]"


def test_the_public_names_are_those_listed() -> None:
    for name in orthomerge.__all__:
        assert getattr(orthomerge, name) is not None
    assert dir(orthomerge) == sorted(orthomerge.__all__)
    with pytest.raises(AttributeError, match="no attribute 'mergge'"):
        orthomerge.mergge  # noqa: B018


def test_merge_verify_export(berts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = call("merge", *options(berts, out=out), "--method", "ties", "--set", "density=0.5", "--set", "scale=0.8")
    assert "heads: two (2), three (3)" in text
    assert json.loads((out / "orthomerge.json").read_text())["method"]["parameters"] == {"density": 0.5, "scale": 0.8}
    assert "as it was written" in call("inspect", str(out), "--verify")
    assert "as it was written" in call("inspect", str(out), "--verify")
    described = json.loads(call("inspect", str(out), "--json"))
    assert (described["problems"], described["tasks"]["two"]["stock_class"]) == ([], "BertForSequenceClassification")
    assert "--verify reads every file" in call("inspect", str(out), "--verify", "--headers", code=2)
    assert "wrote" in call("export", str(out), "--task", "two", "--out", str(tmp_path / "two"))
    assert (tmp_path / "two/config.json").exists()
    message = call("export", str(out), "--task", "tow", "--out", str(tmp_path / "x"), code=2)
    assert "did you mean 'two'" in message
    (out / "README.md").write_text("another")
    assert "README.md has 7 bytes" in call("inspect", str(out), "--verify", code=5)


def test_a_recipe_and_the_command_line_which_wins(berts: Path, tmp_path: Path) -> None:
    (tmp_path / "two").symlink_to(berts / "two")
    (tmp_path / "recipe.yaml").write_text(
        f"base: {berts / 'base'}\nexperts:\n  two: two\n  three: {{path: {berts / 'three'}, labels: [x, y, z]}}\n"
        "method: task_arithmetic\nparameters:\n  scale: {two: 0.5, three: 0.1}\nout: merged\n"
    )
    call("merge", str(tmp_path / "recipe.yaml"))
    manifest = json.loads((tmp_path / "merged/orthomerge.json").read_text())
    assert manifest["method"]["parameters"] == {"scale": [0.5, 0.1]}
    assert manifest["heads"]["three"]["labels"] == ["x", "y", "z"]
    document = json.loads(call("merge", str(tmp_path / "recipe.yaml"), "--method", "average", "--force", "--json"))
    assert document["manifest"]["method"] == {"name": "average", "parameters": {"weights": None}}


def test_plan_lists_all_problems_at_once(berts: Path, tmp_path: Path) -> None:
    given = [*options(berts, out=tmp_path), f"gone={tmp_path / 'gone'}", "--method", "tise", "--json"]
    document = json.loads(call("merge", *given, "--dry-run", code=2))
    assert not document["ok"]
    where = [problem["where"] for problem in document["problems"]]
    assert where == ["method", "expert 'gone'", "out"]
    assert all(problem["fix"] for problem in document["problems"])
    shown = call("merge", *options(berts, out=tmp_path / "out"), "--method", "ties", "--dry-run")
    assert "no problems" in shown
    assert "39 tensors merged" in shown
    assert not (tmp_path / "out").exists()


def test_plan_says_that_the_output_exists(berts: Path, tmp_path: Path) -> None:
    printed = call("merge", *options(berts, out=tmp_path), "--method", "average", "--json", "--dry-run", code=5)
    assert "exists already" in json.loads(printed)["problems"][0]["what"]


def test_inspect(berts: Path) -> None:
    document = json.loads(call("inspect", str(berts / "three"), "--json"))
    assert document["family"] == "bert"
    assert document["head"] == {"classifier.bias": [3], "classifier.weight": [3, 32]}
    assert document["labels"] == ["three-0", "three-1", "three-2"]
    assert document["non_finite"] == {}
    assert len(document["files"]["model.safetensors"]["sha256"]) == 64
    assert "sha256" not in call("inspect", str(berts / "three"), "--headers")


def test_methods() -> None:
    documents = json.loads(call("list", "methods", "--json"))
    assert [document["method"] for document in documents] == [*METHODS, *FITTED]
    assert [document["method"] for document in documents if document["note"]] == list(FITTED)
    shown = call("list", "methods", "ties")
    assert "density = 0.2" in shown
    assert "did you mean 'ties'" in call("list", "methods", "tiess", code=2)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["merge"], 2, "nothing to merge"),
        (["merge", "six="], 2, "must be written EXPERT or NAME=EXPERT"),
        (["merge", "a=b", "--set", "x"], 2, "expected --set KEY=VALUE"),
        (["merge", "a=b", "--set", "x=["], 2, "cannot read the value"),
        (["merge", "nowhere.yaml"], 2, "cannot read the recipe nowhere.yaml"),
        (["inspect", "/nowhere", "--verify"], 3, "is not an orthomerge output"),
        (["inspect", "/no where"], 3, "does not exist"),
    ],
)
def test_mistakes_are_answered_with_a_message(arguments: list[str], code: int, message: str) -> None:
    assert message in call(*arguments, code=code)


def test_main_prints_the_message_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orthomerge.cli.app", "inspect", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("orthomerge: ")
    assert "Traceback" not in done.stderr
