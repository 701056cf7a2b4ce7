"""What a report refuses, and that it is written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.report.making import full_run, record, small_run, write_run

from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.analysis.figures import Bars, Series
from orthomerge.cli.app import app
from orthomerge.core.errors import CheckpointError, OrthomergeError, OutputError, RecipeError
from orthomerge.report import page as pages
from orthomerge.report import report as reports
from orthomerge.report.report import report


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda run: (run / "records.jsonl").unlink(), CheckpointError, "has no records.jsonl; give the run folder"),
        (lambda run: (run / "records.jsonl").write_text(""), CheckpointError, "is empty: there is nothing to report"),
        (lambda run: (run / "notes.json").write_text("{"), CheckpointError, "notes.json is not JSON"),
        (lambda run: (run / "notes.json").write_text("[1]"), CheckpointError, "must be a list of strings"),
        (lambda run: (run / "run.json").write_text("["), RecipeError, "run.json is not JSON"),
        (lambda run: (run / "run.json").write_text('{"comand": ""}'), RecipeError, "did you mean 'command'"),
        (lambda run: (run / "diagnosis.json").write_text("{}"), RecipeError, "is not a diagnosis"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change, error: type[OrthomergeError], message: str) -> None:  # type: ignore[no-untyped-def]
    run = write_run(tmp_path / "run", small_run())
    change(run)
    with pytest.raises(error, match=re.escape(message)):
        report(run, tmp_path / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_no_accuracy_is_nothing_to_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [replace(record("a", "ties", 0.5), metric="calibration")])
    with pytest.raises(CheckpointError, match="holds no accuracy"):
        report(run, tmp_path / "report.html")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        report(tmp_path / "none", tmp_path / "report.html")


@pytest.mark.parametrize(("keys", "message"), [(["../x"], "lower-case letters"), (["a", "a"], "two figures")])
def test_keys_name_files(tmp_path: Path, keys: list[str], message: str) -> None:
    bars = [Bars(key, "t", "c", ("g",), "u", (Series("s", (1.0,)),)) for key in keys]
    run = write_run(tmp_path / "run", small_run(), diagnosis=Diagnosis("ties", ("a",), (), tuple(bars)))
    with pytest.raises(RecipeError, match=message):
        report(run, tmp_path / "report.html")


def test_nothing_is_half_written_when_drawing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = full_run(tmp_path / "run")
    out = tmp_path / "out" / "report.html"
    report(run, out)
    before = {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}

    def fails(figure: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(reports, "draw", fails)
    with pytest.raises(RuntimeError, match="no ink"):
        report(run, out)
    assert {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()} == before


def test_nothing_is_half_written_when_the_page_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = full_run(tmp_path / "run"), tmp_path / "out" / "report.html"
    report(run, out)
    before = {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}
    fsync = os.fsync

    def full_disk(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name.startswith(".report.html."):
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full_disk)
    write_run(run, small_run(("a", "b", "c")))
    with pytest.raises(OutputError, match="No space left"):
        report(run, out)
    assert {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()} == before


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", small_run())
    done = report(run, tmp_path / "report.html")
    write_run(run, small_run(("a", "b", "c")))
    report(run, tmp_path / "report.html")
    (done.files / "tables" / "notes.md").write_text("years of work")
    with pytest.raises(OutputError, match=r"report_files holds 'tables/notes.md', which orthomerge did not write"):
        report(run, tmp_path / "report.html")
    other = tmp_path / "mine_files"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"mine_files was not written by orthomerge \(it has no orthomerge-report"):
        report(run, tmp_path / "mine.html")
    (tmp_path / "own.html").write_text("years of work")
    with pytest.raises(OutputError, match=r"own.html is there already and no report of ours"):
        report(run, tmp_path / "own.html")
    assert (tmp_path / "own.html").read_text() == "years of work"
    for name in (".own2_files.partial", ".own2_files.old", ".own2.html.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    report(run, tmp_path / "own2.html")
    assert len(list(tmp_path.glob(".own2*/thesis.tex"))) == 3
    with pytest.raises(RecipeError, match=r"must be the name of an \.html file"):
        report(run, tmp_path / "report.pdf")
    (tmp_path / "f.html").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        report(run, tmp_path / "f.html")


def test_the_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", small_run())
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html"), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["page"] == str(tmp_path / "r.html")
    assert told["size"] == (tmp_path / "r.html").stat().st_size
    plain = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html")])
    assert "3 tables as Markdown, CSV and LaTeX" in plain.output
    failed = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "r.html")])
    assert isinstance(failed.exception, CheckpointError)
    assert failed.exception.exit_code == 3


@pytest.mark.parametrize(("module", "message"), [("matplotlib", "figures need matplotlib"), ("jinja2", "needs jinja2")])
def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    run = write_run(tmp_path / "run", small_run())
    monkeypatch.setitem(sys.modules, module, None)
    pages._environment.cache_clear()
    with pytest.raises(RecipeError, match=message):
        report(run, tmp_path / "report.html")


def test_notes_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", small_run(), notes=["x"])
    read_text = Path.read_text

    def denied(self: Path, **given: str) -> str:
        if self.name == "notes.json":
            raise PermissionError(13, "Permission denied")
        return read_text(self, **given)

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(CheckpointError, match=r"notes\.json: Permission denied; evaluate again"):
        report(run, tmp_path / "report.html")
