"""Command lines that a verdict suggests say what they must, and no more."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from orthomerge.analysis.commands import suggested_commands
from orthomerge.api.merge import merge
from orthomerge.api.open import open as open_experts
from orthomerge.cli.app import app
from orthomerge.models.manifest import read_manifest
from orthomerge.models.saved import is_output


def test_a_saved_model_needs_its_data_only(berts: Path) -> None:
    experts = open_experts({"two": berts / "two"}, base=berts / "base")
    commands = suggested_commands("my out/", {"two": "two.csv"}, experts, aligner="ridge")
    assert commands == {
        "align": "orthomerge align 'my out/' --aligner ridge --data two=two.csv --out 'my out'-aligned",
        "probe": "orthomerge evaluate 'my out/' --data two=two.csv --protocol current --protocol probe",
        "refit": f"orthomerge merge two={berts / 'two'} --base {berts / 'base'} --method realign "
        "--data two=two.csv --out 'my out'-realigned",
    }
    moved = suggested_commands("out", {"two": "two.csv"}, experts, base="b", moved={"two": "e"})
    assert moved["align"] == (
        "orthomerge align out --aligner auto --data two=two.csv --base b --expert two=e --out out-aligned"
    )


def test_a_new_merge_opens_its_experts_in_the_same_way(
    berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "two.csv").write_text("text\n" + "a good film\nbad\nit was not very good\nnot a film\n" * 4)
    experts = open_experts(
        {"two": berts / "two"}, base=berts / "base", pooling="mean", missing="base", ignore=["bert.no.*"]
    )
    merge(experts, "task_arithmetic").save(tmp_path / "out")
    data = {"two": str(tmp_path / "two.csv")}
    command = suggested_commands(str(tmp_path / "out"), data, experts)["refit"]
    assert "--set pooling=mean --set 'ignore=[\"bert.no.*\"]' --set missing=base" in command
    quick = ["--set", "steps=2", "--set", "copies=0", "--set", "batch=4", "--device", "cpu", "-q"]
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], *quick])
    assert result.exception is None, repr(result.exception)
    assert is_output(tmp_path / "out-realigned")
    opening = read_manifest(tmp_path / "out-realigned")["opening"]
    assert (opening["pooling"], opening["missing"], opening["ignore"]) == ("mean", "base", ["bert.no.*"])


def test_what_a_command_line_cannot_say_is_not_suggested(berts: Path) -> None:
    named = open_experts({"two": berts / "two"}, base=berts / "base", labels={"two": ["no", "yes"]})
    assert "refit" not in suggested_commands("out", {"two": "two.csv"}, named)
    without = open_experts({"two": berts / "two"})
    assert "refit" not in suggested_commands("out", {"two": "two.csv"}, without)
