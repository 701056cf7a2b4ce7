"""A report from a run folder: what is there is shown, what is absent is left out, and nothing is half-written."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.reporting.making import ALERT, BREAK_OUT, full_run, hostile_run, points, record, small_run, write_run

from orthomerge.analysis.diagnosis import Bars, Diagnosis, Series, write_diagnosis
from orthomerge.core.errors import CheckpointError, OutputError, RecipeError
from orthomerge.evaluation.records import Record, RunInfo, read_info, write_info
from orthomerge.reporting import report as reports
from orthomerge.reporting.contents import numbers_of
from orthomerge.reporting.figure_data import json_block, points_payload
from orthomerge.reporting.report import report
from orthomerge.reporting.tables import boards, summarise


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: Path) -> _Reader:
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


def test_everything_is_there(tmp_path: Path) -> None:
    done, again = (report(full_run(tmp_path / "run"), tmp_path / name / "report.html") for name in ("out", "again"))
    assert done.page.read_bytes() == again.page.read_bytes()
    text = " ".join(" ".join(read(done.page).text).split())
    for wanted in (
        "The experts score 90.0 % over 2 tasks. Merged into one encoder by ties, the model reaches 60.0 %.",
        "With its heads aligned it reaches 84.0 %: 80 % of what merging had lost is recovered, without a single new",
        "aligned by auto on 50 inputs per task from train (inductive)",
        *("Mostly misalignment", "a doubt", "density = 0.2", "abababababab", "cdcdcdcdcdcd", "no, yes", "0:02:05"),
        *("812.0 MB", "orthomerge run r.yaml", "method: ties", "2026-11-15", "No longer exist: gone"),
        *("perplexity = 30", "1,234"),
    ):
        assert wanted in text, wanted
    assert "weights" not in text
    names = sorted(path.relative_to(done.files).as_posix() for path in done.files.rglob("*") if path.is_file())
    shots = [name for name in names if name.startswith("figures/shots")]
    assert shots == [f"figures/shots.{form}" for form in ("csv", "png", "svg")]
    assert {"tables/inductive.tex", "tables/transductive.md", "tables/comparisons.csv"} <= set(names)
    assert done.figures == ["accuracy-by-task", "shots", "cka", "cosines", "families", "points-0", "points-1"]
    # The policy forbids everything else.
    page = read(done.page)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy
    for tag, attributes in page.tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)


def test_records_alone_are_enough(tmp_path: Path) -> None:
    done = report(write_run(tmp_path / "run", small_run()), tmp_path / "report.html", title="Mine")
    page = read(done.page)
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"accuracy", "reproduce", "figures"} <= ids
    assert not {"verdict", "notes", "points", "comparisons", "merged", "cost"} & ids
    assert "Mine" in page.text
    assert done.tables == ["data-free", "inductive", "transductive"]
    # A run with one row has no story to draw.
    done = report(write_run(tmp_path / "one", [record("a", "ties", 0.5)]), tmp_path / "one.html")
    assert done.figures == []
    assert "the model reaches 50.0\u00a0% on one task." in done.page.read_text()


def test_what_a_name_says_is_never_markup(tmp_path: Path) -> None:
    done = report(hostile_run(tmp_path / "run"), tmp_path / "report.html", title=BREAK_OUT)
    page = read(done.page)
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not {"img", "i"} & {tag for tag, _ in page.tags}
    assert any(ALERT in text for text in page.text)
    assert "<script" not in (done.files / "tables" / "inductive.md").read_text()
    assert "<script" not in (done.files / "figures" / "points-0.svg").read_text()


def test_a_number_and_its_interval_are_one() -> None:
    interval = {"won": 23.13, "won, low": 21.67, "won, high": 24.6}
    numbers = {**interval, "cosine": -0.0927, "alone, low": 1.0, "n": 1168, "0": 0}
    shown = {"won": "23.1 (21.7 to 24.6)", "cosine": "-0.0927", "alone, low": "1.00", "n": "1,168", "0": "0"}
    assert numbers_of(numbers) == list(shown.items())


def test_half_a_character_is_no_reason_to_fail(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", small_run(), diagnosis=Diagnosis("ties", ("a",), (), (points("a"),)))
    for name in ("records.jsonl", "diagnosis.json"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace("toy", "\\ud83d").replace("cat", "\\ud83d").replace("somebody", "\\ud83d"))
    done = report(run, tmp_path / "report.html")
    assert "?: one model from many" in done.page.read_text(encoding="utf-8")


def test_json_cannot_leave_its_element() -> None:
    text = json_block({"a": "</script><!--", "b": "&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--", "b": "&\u2028"}


def test_only_png_is_shown_and_views_share_a_frame() -> None:
    figure = points("a", count=3, images=True)
    images = ("data:image/svg+xml;base64,AAAA", "javascript:alert(1)", figure.images[0])
    payload = points_payload(replace(figure, images=images))
    assert payload["images"] == ["", "", figure.images[0]]
    figure = points("a", count=2)
    near, far = (replace(figure.views[0], x=x, y=(0.0, 1.0)) for x in ((0.0, 1.0), (0.0, 10.0)))
    payload = points_payload(replace(figure, views=(near, far)))
    assert [view["x"] for view in payload["views"]] == [[0, 400], [0, 4000]]
    assert [view["y"] for view in payload["views"]] == [[400, 0], [400, 0]]
    assert payload["size"] == [4000, 400]


def test_the_story_speaks_of_the_diagnosed_method() -> None:
    tables = boards(small_run() + [record(task, "average", 0.5) for task in ("a", "b")])
    for method, own in ((None, "ties"), ("average", "average")):
        assert [line.method for line in summarise(tables, method=method).steps.values()] == ["expert", own, own]


@pytest.mark.parametrize(
    ("records", "end"),
    [
        (
            [row for row in small_run() if row.access != "inductive"],
            " recovered (aligned on the test inputs themselves).",
        ),
        ([record("a", "ties", 0.6), record("a", "average", 0.7)], "by average, the model reaches 70.0 % on one task."),
        ([record("a", "ties", 0.6, protocol="knn")], "Accuracy on one task."),
    ],
)
def test_ends_of_stories(records: list[Record], end: str) -> None:
    sentence = summarise(boards(records)).sentence
    assert sentence.endswith(end)
    assert "parameter" not in sentence


def test_run_info_goes_to_disk_and_back(tmp_path: Path) -> None:
    info = RunInfo("c", "r", "now", {"merge": 1.0}, 5, "m", {"torch": "2"}, ("out", {"method": {"name": "ties"}}))
    write_info(tmp_path / "run.json", info)
    assert read_info(tmp_path / "run.json") == info
    with pytest.raises(CheckpointError, match="cannot read"):
        read_info(tmp_path / "none.json")


def with_keys(*keys: str) -> Callable[[Path], object]:
    """Write a diagnosis whose figures have these keys."""
    bars = tuple(Bars(key, "t", "c", ("g",), "u", (Series("s", (1.0,)),)) for key in keys)
    return lambda run: write_diagnosis(run / "diagnosis.json", Diagnosis("ties", ("a",), (), bars))


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def of_another_metric(run: Path) -> None:
    records = (run / "records.jsonl").read_text()
    (run / "records.jsonl").write_text(records.replace('"accuracy"', '"calibration"'))


REFUSED: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    (lambda run: run.rename(run.with_name("elsewhere")), CheckpointError, "is not a folder"),
    (lambda run: (run / "records.jsonl").unlink(), CheckpointError, "has no records.jsonl; give the run folder"),
    (write("records.jsonl", ""), CheckpointError, "is empty: there is nothing to report"),
    (of_another_metric, RecipeError, "'metric' must be accuracy, got 'calibration'"),
    (write("notes.json", "{"), CheckpointError, "notes.json is not JSON"),
    (lambda run: (run / "notes.json").symlink_to("/proc/self/mem"), CheckpointError, "cannot read"),
    (write("run.json", "["), RecipeError, "run.json is not JSON"),
    (write("run.json", '{"comand": ""}'), RecipeError, "did you mean 'command'"),
    (write("run.json", '{"manifests": ["models"]}'), CheckpointError, "is not an orthomerge output"),
    (write("run.json", '{"manifests": [{"method": "ties"}]}'), CheckpointError, "run.json is incomplete (KeyError: "),
    (write("diagnosis.json", "{}"), RecipeError, "is not a diagnosis"),
    (with_keys("../x"), RecipeError, "lower-case letters"),
    (with_keys("a", "a"), RecipeError, "key of its own"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused(tmp_path: Path, change: Callable[[Path], object], error: type[Exception], message: str) -> None:
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
def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    reports.templates.cache_clear()
    with pytest.raises(RecipeError, match=message):
        report(write_run(tmp_path / "run", small_run()), tmp_path / "report.html")
