"""One browser for all tests of this folder, and pages to open in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.chromium import Chromium, find_chromium, running
from tests.reporting.making import ALERT, comparison, figures, hostile_run, points, record, small_run, write_run

from orthomerge.analysis.diagnosis import Diagnosis, Finding
from orthomerge.evaluation.records import RunInfo
from orthomerge.reporting.report import report


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine; apt-get install chromium")
    pytest.importorskip("websockets", reason="the browser tests speak over websockets")
    with running(program) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole report: six tasks, three tables, points with texts and with thumbnails."""
    folder = tmp_path_factory.mktemp("report")
    tasks = [f"task-{number}" for number in range(6)]
    records = [*small_run(tasks), *(record(task, "ties", 0.1, protocol="joint") for task in tasks)]
    by = {(item.method, item.access, item.protocol): item for item in records if item.task == tasks[0]}
    plain, expert = by["ties", "data-free", "current"], by["expert", "data-free", "current"]
    diagnosis = Diagnosis(
        "ties", tuple(tasks), (Finding("Mostly misalignment", "Try `auto`.", {"won back": 24.0}),),
        (*figures(tasks), points("task-0"), points("task-1", seed=1, images=True)), {"seed": 0},
    )  # fmt: skip
    info = RunInfo("orthomerge run r.yaml", "method: ties\n", seconds={"merge": 1.5}, memory=10**9)
    compared = [comparison(plain, expert, verdict="worse", tasks=tasks, worse=tasks[:2])]
    run = write_run(folder / "run", records, comparisons=compared, notes=["a doubt"], diagnosis=diagnosis, info=info)
    return report(run, folder / "report.html").page


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    return report(hostile_run(folder / "run"), folder / "report.html", title=ALERT).page
