"""How large a report is, and how soon a person can use it: 8 tasks x 20 methods x 4 protocols, 8 x 400 points.

python benchmarks/report.py [--runs N]        (Debian's chromium must be installed)
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import describe_run, table, write_result
from tests.browser.chromium import Chromium, find_chromium, running
from tests.reporting.making import comparison, figures, points, record, write_run

from orthomerge.analysis.diagnosis import Diagnosis, Figure, Finding, Points
from orthomerge.evaluation.records import Record
from orthomerge.reporting.report import Written, report

SIZE, SECONDS = 8.0, 2.0  # what issue 6 asks for: megabytes, seconds until the page answers
READY = "ready: tables sort, points answer"
FRAME = "await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);"
PARTS = {
    "sort a column": "document.querySelector('table.accuracy thead th.mean button').click();",
    "filter": "const i = document.getElementById('find'); i.value = 'method-1'; "
    "i.dispatchEvent(new Event('input', {bubbles: true}));",
    "switch the task": "const s = document.getElementById('p-task'); s.value = '3'; "
    "s.dispatchEvent(new Event('change'));",
    "toggle the view, first frame": "document.querySelectorAll('#p-views button')[1].click();",
}


def large_run(folder: Path, *, tasks: int = 8, methods: int = 20, inputs: int = 400) -> Path:
    """8 tasks x 20 methods x 4 protocols, compared, and a diagnosis with points for each task."""
    draw = random.Random(0)
    names = [f"task-{number}" for number in range(tasks)]
    ways: list[dict[str, object]] = [
        {"protocol": "current", "access": "data-free"},
        {"protocol": "knn", "access": "inductive", "support": "train", "shots": 5},
        {"protocol": "aligned-c", "access": "inductive", "support": "train"},
        {
            "protocol": "current",
            "access": "transductive",
            "support": "test",
            "aligner": "surgery",
            "extra_parameters": 4096,
        },
    ]
    records: list[Record] = []
    comparisons = []
    for way in ways:
        rows = []
        for number in range(methods):
            kind = "expert" if number == 0 else f"method-{number:02d}"
            own = [record(task, kind, min(0.97, 0.55 + 0.02 * number + draw.random() / 10), **way) for task in names]  # type: ignore[arg-type]
            rows.append(own)
            records += own
        best = rows[-1][0]
        comparisons += [comparison(own[0], best, verdict="worse", tasks=names, worse=names[:3]) for own in rows[:-1]]
    text = " ".join(("it", "was", "neither", "good", "nor", "bad", "and", "nobody", "knew", "why") * 3)
    drawn: list[Figure] = [*figures(names)]
    labels = [f"class {number}" for number in range(6)]
    for number, task in enumerate(names):
        plain = points(task, count=inputs, classes=labels, seed=number)
        drawn.append(
            Points(
                plain.key, plain.title, plain.caption, task, plain.classes, plain.true, plain.views,
                texts=tuple(f"{place}: {text}" for place in range(inputs)),
            )
        )  # fmt: skip
    verdict = tuple(Finding(f"Finding {number}", "Something was found out.", {"points": 1.5}) for number in range(5))
    diagnosis = Diagnosis("method-05", tuple(names), verdict, tuple(drawn), {"seed": 0})
    return write_run(folder, records, comparisons=comparisons, notes=["a note"], diagnosis=diagnosis)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    program = find_chromium()
    if program is None:
        raise SystemExit("there is no Chromium on this machine; apt-get install chromium")
    about = describe_run()
    with tempfile.TemporaryDirectory() as folder:
        run = large_run(Path(folder) / "run")
        started = time.perf_counter()
        done = report(run, Path(folder) / "report.html")
        took = time.perf_counter() - started
        beside = sum(path.stat().st_size for path in done.files.rglob("*") if path.is_file()) / 1e6
        with running(program) as browser:
            times = [_open(browser, done) for _ in range(runs)]
            version = browser.name
    rows = [[name, *(f"{1000 * of(one[name] for one in times):.0f}" for of in (median, max))] for name in times[0]]
    size, ready = done.size / 1e6, max(one[READY] for one in times)
    small, soon = ("" if met else "NOT " for met in (size < SIZE, ready < SECONDS))
    summary = [
        "8 tasks x 20 methods x 4 protocols, and 8 figures of 400 points with texts in three views.",
        "",
        f"- the page: {size:.2f} MB, {small}under {SIZE:g} MB",
        f"- ready {ready:.2f} s after the order to load (slowest of {runs}): {soon}within {SECONDS:g} s",
        f"- made in {took:.1f} s; {len(done.figures)} figures and {len(done.tables)} tables beside it, {beside:.1f} MB",
    ]
    path = write_result(
        "report",
        {
            "# A large report": "\n".join(summary),
            "## Run": about,
            f"## Milliseconds in {version}, without a window": table(["what", "median", "slowest"], rows),
        },
    )
    print(path.read_text())


def _open(browser: Chromium, done: Written) -> dict[str, float]:
    """Seconds from the order to load until each is done; the parts from the click to the second frame after it."""
    with browser.tab(width=1280, height=900) as tab:
        started = time.perf_counter()
        tab.open(done.page)
        loaded = time.perf_counter() - started
        tab.until("document.querySelector('#p-canvas').dataset.settled && document.querySelector('thead button')")
        found = {"load event": loaded, READY: time.perf_counter() - started}
        for name, script in PARTS.items():
            found[name] = (
                tab.run(
                    f"(async () => {{const t = performance.now(); {script} {FRAME} return performance.now() - t;}})()"
                )
                / 1000
            )
        problems = tab.problems()
        if problems:
            raise SystemExit(f"the page complains: {problems[0]}")
        return found


if __name__ == "__main__":
    main()
