"""What a report refuses, and that it is written whole or not at all."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.reporting.making import full_run, record, small_run, write_run

from orthomerge.analysis.diagnosis import Bars, Diagnosis, Series, write_diagnosis
from orthomerge.core.errors import CheckpointError, OrthomergeError, OutputError, RecipeError
from orthomerge.evaluation.records import write_records
from orthomerge.reporting import report as reports
from orthomerge.reporting.report import report


def with_keys(*keys: str) -> Callable[[Path], object]:
    """Write a diagnosis whose figures have these keys."""
    bars = tuple(Bars(key, "t", "c", ("g",), "u", (Series("s", (1.0,)),)) for key in keys)
    return lambda run: write_diagnosis(run / "diagnosis.json", Diagnosis("ties", ("a",), (), bars))


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def without_accuracy(run: Path) -> None:
    write_records(run / "records.jsonl", [replace(record("a", "ties", 0.5), metric="calibration")])


REFUSED: list[tuple[Callable[[Path], object], type[OrthomergeError], str]] = [
    (lambda run: run.rename(run.with_name("elsewhere")), CheckpointError, "is not a folder"),
    (lambda run: (run / "records.jsonl").unlink(), CheckpointError, "has no records.jsonl; give the run folder"),
    (write("records.jsonl", ""), CheckpointError, "is empty: there is nothing to report"),
    (without_accuracy, CheckpointError, "holds no accuracy"),
    (write("notes.json", "{"), CheckpointError, "notes.json is not JSON"),
    (write("notes.json", "[1]"), CheckpointError, "must be a list of strings"),
    (lambda run: (run / "notes.json").symlink_to("/proc/self/mem"), CheckpointError, "cannot read"),
    (write("run.json", "["), RecipeError, "run.json is not JSON"),
    (write("run.json", '{"comand": ""}'), RecipeError, "did you mean 'command'"),
    (write("run.json", '{"manifests": ["models"]}'), CheckpointError, "is not an orthomerge output"),
    (write("run.json", '{"manifests": [{"method": "ties"}]}'), CheckpointError, "run.json is incomplete (KeyError: "),
    (write("diagnosis.json", "{}"), RecipeError, "is not a diagnosis"),
    (with_keys("../x"), RecipeError, "lower-case letters"),
    (with_keys("a", "a"), RecipeError, "two figures"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_runs_that_are_refused(
    tmp_path: Path, change: Callable[[Path], object], error: type[OrthomergeError], message: str
) -> None:
    run = write_run(tmp_path / "runs" / "run", small_run())
    (run / "models").mkdir()
    change(run)
    with pytest.raises(error, match=re.escape(message)):
        report(run, tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stage", ["drawing", "writing"])
def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    run, out = full_run(tmp_path / "run"), tmp_path / "out" / "report.html"
    report(run, out)
    before = files_below(out.parent)
    fsync = os.fsync

    def full_disk(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name.startswith(".report.html."):
            raise OSError(28, "No space left on device")
        fsync(handle)

    def out_of_ink(figure: object) -> None:
        raise OutputError("No space left for ink")

    if stage == "drawing":
        monkeypatch.setattr(reports, "draw", out_of_ink)
    else:
        monkeypatch.setattr(os, "fsync", full_disk)
    write_run(run, small_run(("a", "b", "c")))
    with pytest.raises(OutputError, match="No space left"):
        report(run, out)
    assert files_below(out.parent) == before


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", small_run())
    files = report(run, tmp_path / "report.html").files
    write_run(run, small_run(("a", "b", "c")))
    report(run, tmp_path / "report.html")
    (files / "tables" / "notes.md").write_text("years of work")
    (tmp_path / "mine_files").mkdir()
    (tmp_path / "mine_files" / "thesis.tex").write_text("years of work")
    (tmp_path / "own.html").write_text("years of work")
    (tmp_path / "f.html").mkdir()
    for name, message in (
        ("report.html", r"report_files holds 'tables/notes.md', which orthomerge did not write"),
        ("mine.html", r"mine_files was not written by orthomerge \(it has no orthomerge-report"),
        ("own.html", r"own.html is there already and no report of ours"),
        ("f.html", "is a folder"),
        ("report.pdf", r"must be the name of an \.html file"),
    ):
        with pytest.raises((OutputError, RecipeError), match=message):
            report(run, tmp_path / name)
    assert (tmp_path / "own.html").read_text() == "years of work"
    for name in (".own2_files.partial", ".own2_files.old", ".own2.html.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    report(run, tmp_path / "own2.html")
    assert len(list(tmp_path.glob(".own2*/thesis.tex"))) == 3


@pytest.mark.parametrize(("module", "message"), [("matplotlib", "figures need matplotlib"), ("jinja2", "needs jinja2")])
def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    reports.templates.cache_clear()
    with pytest.raises(RecipeError, match=message):
        report(write_run(tmp_path / "run", small_run()), tmp_path / "report.html")
