"""`negate` and `analogy` from the command line, on models that are made in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.calling import call, refused
from tests.cli.conftest import COUNTS, write_word_tables

from orthomerge.models.saved import verify_folder

# The labels are those of the experts.
WORDS = {
    "two": {"bad": "two-0", "good": "two-1"},
    "three": {"film": "three-0", "it": "three-1", "not": "three-2"},
    "other": {"good": "two-0", "bad": "two-1"},
}


@pytest.fixture(scope="module")
def label_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which word is in the text?"""
    folder = tmp_path_factory.mktemp("tables")
    write_word_tables(folder, WORDS)
    return folder


def negating(berts: Path, tables: Path) -> list[object]:
    return [
        "negate", berts / "two", "--base", berts / "base", "--target", "two", "--device", "cpu",
        "--grid", "1,0.5", *(f"--data={name}={tables / name}.csv" for name in ("two", "three")),
    ]  # fmt: skip


def solving(berts: Path, table: Path) -> list[object]:
    return [
        "analogy", berts / "two", berts / "three", berts / "five", "--base", berts / "base", "--device", "cpu",
        "--grid", "0.5,1", "--of", "three:five::two", f"--data=other={table}",
    ]  # fmt: skip


def test_negate(berts: Path, label_tables: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Next to nothing has to be kept, or it would hang on a single input which scale is taken.
    words = [*negating(berts, label_tables), "--keep", 0.01]
    document = json.loads(call(*words, "--out", out, "--json").stdout)
    assert (document["out"], document["heads"]) == (str(out), "probe")
    found = document["negated"]
    assert [point["scale"] for point in found["curve"]] == [0.0, 0.5, 1.0]
    assert found["base"]["three"]["examples"] == COUNTS["test"]
    assert found["scale"] > 0
    assert verify_folder(out) == []
    result = call(*words, "--out", out, "--force")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["test", "accuracy", "scale", "two", "three", "control", "kept"]
    assert [line.split("  ")[0].strip() for line in lines[1:4]] == ["base", "minus two", "random vector"]
    assert "scored with probes on the base's features" in result.stdout
    assert lines[-1] == f"wrote {out}, verified; heads: two"
    assert "random vector: scale 1: two " in result.stderr
    folder = [*words[: words.index("1,0.5") + 1], "--data", label_tables, "--control", "three", "--keep", 0.01]
    assert call(*folder, "--quiet").stdout.splitlines()[:4] == lines[:4]
    assert call(*folder, "--quiet").stderr == ""


def test_analogy(berts: Path, label_tables: Path) -> None:
    words = solving(berts, label_tables / "other.csv")
    result = call(*words)
    titles = [line.split("  ")[0].strip() for line in result.stdout.splitlines()[:4]]
    assert titles == ["test accuracy", "base", "fine-tuned on two", "analogy, unscaled"]
    assert "scored with the head of two; coefficients chosen on validation data of other" in result.stdout
    assert "three:five::two: scale 0.5, shift 0.5: " in result.stderr
    document = json.loads(call(*words, "--independent", f"other={berts / 'two'}", "--json").stdout)
    assert (document["task"], document["out"], len(document["curve"])) == ("other", None, 9)
    # Fine-tuned on `two` is what was given as the task's own expert, too.
    assert document["expert"] == document["auxiliary"]


def test_a_search_that_finds_nothing_better_writes_nothing(berts: Path, label_tables: Path, tmp_path: Path) -> None:
    strict = [*negating(berts, label_tables), "--keep", 1.0, "--grid", "300"]
    worse = [*solving(berts, label_tables / "two.csv"), "--grid", "300"]
    for words, shown, message in (
        (strict, "scale 0 is the base", "nothing of the grid forgets 'two' and keeps 100% of the control"),
        (worse, "that is the base", "nothing of the grid is better for 'other'"),
    ):
        assert f"{shown}: {message}" in call(*words).stdout
        assert message in refused(*words, "--out", tmp_path / "out", code=2)
        assert not (tmp_path / "out").exists()
        exists = call(*words, "--out", tmp_path, code=5)
        assert "exists already; give --force" in str(exists.exception)
        assert exists.stderr == ""  # nothing had begun
