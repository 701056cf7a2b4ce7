"""From what the jobs of a sweep made to one run folder.

RUN/records.jsonl, predictions/, comparisons.json, notes.json, table.md, run.json, report.html    as of `orthomerge run`
RUN/validation.jsonl     the same questions on val, where the best is chosen there
RUN/sweep.csv, sweep.md  every cell, the best for each budget of inputs, and what failed
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orthomerge.blocks import Report
from orthomerge.evaluation.comparisons import compare_run
from orthomerge.evaluation.running import Run
from orthomerge.evaluation.tables import lines
from orthomerge.output import link_files
from orthomerge.recipe import Recipe
from orthomerge.records import Record, read_records, write_records, write_whole
from orthomerge.runinfo import FILE as INFO
from orthomerge.runinfo import RunInfo, write_info
from orthomerge.running.digests import digest_of
from orthomerge.running.evaluation import RECORDS, written_files
from orthomerge.running.info import machine, peak_memory, versions
from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.kinds.sweep_models import FAILED
from orthomerge.running.jobs.kinds.sweep_scores import MERGE, NOTES, VALIDATION
from orthomerge.running.jobs.plan import Plan
from orthomerge.running.jobs.store import Store
from orthomerge.running.ledger import Ledger
from orthomerge.running.sweeping.cells import cells_of, sweep_of
from orthomerge.running.sweeping.choosing import Best, Failure, Row, best_of, rows_of, sweep_csv, sweep_markdown
from orthomerge.running.sweeping.cutting import readout_of
from orthomerge.version import VERSION

__all__ = ["Finished", "finish_sweep"]

_STAGE, _PAGE = "sweep", "report.html"
_SCORED = ("sweep-score", "sweep-joint")


@dataclass(frozen=True)
class Finished:
    """What a sweep came to. `found`: nothing was new."""

    rows: list[Row]
    best: list[Best]
    failures: list[Failure] = field(default_factory=list)
    page: Path | None = None
    found: bool = False


def finish_sweep(plan: Plan, ledger: Ledger) -> Finished:
    """Write everything that comes after the jobs; where nothing is new, only say what there is."""
    store, recipe = Store(ledger.run), plan.made_recipe()
    failures = list(_failures(plan, store))
    records, validation = _read(plan, store, RECORDS), _read(plan, store, VALIDATION)
    rows = rows_of(cells_of(recipe), records, validation, failures)
    best = best_of(rows)
    failed = {(failure.name, failure.way) for failure in failures}
    whole = [record for record in records if (record.method, record.way) not in failed]
    page = ledger.run / _PAGE if recipe.report is not False and whole else None
    made = Finished(rows, best, failures, page)
    last = [job for job in plan.jobs if job.kind == "sweep-finish"]
    key = digest_of([VERSION, [job.key for job in last], plan.text, [failure.title for failure in failures]])
    if ledger.has(_STAGE, key):
        return replace(made, found=True)
    ledger.begin(_STAGE)
    started = time.perf_counter()
    files = _write(plan, recipe, ledger.run, store, whole, validation, made)
    digests = {path: ledger.digests.file(path) for path in files}
    ledger.add(_STAGE, key, digests, seconds=time.perf_counter() - started, memory=peak_memory())
    return made


def _read(plan: Plan, store: Store, name: str) -> list[Record]:
    paths = [store.place(job.key) / name for job in plan.jobs if job.kind in _SCORED]
    return [record for path in paths if path.is_file() for record in read_records(path)]


def _failures(plan: Plan, store: Store) -> Iterator[Failure]:
    """Of every score, which question could not be answered; all of them where the merge or its features failed."""
    _, scored = sweep_of(plan.made_recipe())
    for job in plan.of("sweep-score"):
        path = store.place(job.key) / FAILED
        if not path.is_file():
            continue
        for item in json.loads(path.read_text(encoding="utf-8")):
            for way in _ways(job, scored.support, item):
                yield Failure(job.spec["subject"], job.spec["task"], item.get("split", "test"), way, item["message"])


def _ways(job: Job, support: str, item: dict[str, Any]) -> Iterator[Any]:
    blank = Record("", "", "", "accuracy", 0, 0, 0, 0, job.spec["seen"])
    for question in readout_of(job).questions(first=0, seeds=1, support=support):
        if "split" not in item or (item["shots"], item["access"]) == (question.shots, question.access):
            yield question.written(blank).way


def _write(
    plan: Plan,
    recipe: Recipe,
    run: Path,
    store: Store,
    records: Sequence[Record],
    validation: Sequence[Record],
    made: Finished,
) -> list[Path]:
    """Every file of the run folder, in an order in which nobody finds what does not belong together."""
    _, scored = sweep_of(recipe)
    for derived in ("notes.json", "comparisons.json", "table.md", "sweep.md", "sweep.csv"):
        (run / derived).unlink(missing_ok=True)
    _put_predictions(plan, store, run)
    write_records(run / RECORDS, records)
    write_records(run / VALIDATION, validation)
    comparisons = compare_run(run, against=_against(scored.against, records), margin=scored.margin / 100)
    notes = [note for job in plan.of("sweep-notes") for note in _json(store.place(job.key) / NOTES)]
    notes += _own_notes(made)
    write_whole(run / "table.md", Run(list(records), comparisons, notes).markdown() + "\n")
    for name, document in (("comparisons.json", [asdict(each) for each in comparisons]), ("notes.json", notes)):
        write_whole(run / name, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    tasks = list(scored.data)
    write_whole(run / "sweep.csv", sweep_csv(made.rows, made.best, tasks))
    write_whole(run / "sweep.md", sweep_markdown(made.rows, made.best, made.failures, _references(records)))
    write_info(run / INFO, _info(plan, store))
    files = [*written_files(run, list(records)), *(run / name for name in (VALIDATION, "sweep.csv", "sweep.md", INFO))]
    return files if made.page is None else [*files, *_report(run, recipe, made.page)]


def _against(name: str | None, records: Sequence[Record]) -> str | None:
    """The reference of the comparisons, unless it failed."""
    return name if any(record.method == name for record in records) else None


def _put_predictions(plan: Plan, store: Store, run: Path) -> None:
    target = run / "predictions"
    target.mkdir(exist_ok=True)
    for job in plan.jobs:
        folder = store.place(job.key) / "predictions"
        for path in sorted(folder.glob("*.npz")) if job.kind in _SCORED else ():
            (target / path.name).unlink(missing_ok=True)
            link_files(folder, target, [path.name])


def _own_notes(made: Finished) -> list[str]:
    where = "sweep.md has those that validation chose" if any(item.chosen for item in made.best) else "see sweep.md"
    told = f"{len(made.rows)} ways to merge and read were scored on the same test inputs, so the best row of a table"
    found = [f"{told} is the best in hindsight; {where}"]
    failed = {(failure.name, failure.way) for failure in made.failures}
    return found + ([f"{len(failed)} of them failed on some task and are left out; see sweep.md"] if failed else [])


def _references(records: Sequence[Record]) -> dict[str, float]:
    return {
        line.method: line.mean
        for line in lines(records)
        if line.method in ("base", "expert") and line.protocol == "current" and line.way.aligner is None
    }


def _info(plan: Plan, store: Store) -> RunInfo:
    done = [(job.kind, found) for job in plan.jobs if (found := store.found(job.key)) is not None]
    seconds = {kind.removeprefix("sweep-"): 0.0 for kind, _ in done}
    for kind, found in done:
        seconds[kind.removeprefix("sweep-")] += found.seconds
    places = [store.place(job.key) / MERGE for job in plan.of("sweep-joint") if job.spec["subject"] != "base"]
    return RunInfo(
        command=plan.command,
        recipe=plan.text,
        started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        seconds={kind: round(value, 3) for kind, value in seconds.items()},
        memory=max((found.memory for _, found in done), default=peak_memory()),
        machine=machine(),
        versions=versions(),
        manifests=tuple(_json(path) for path in places if path.is_file()),
    )


def _report(run: Path, recipe: Recipe, page: Path) -> list[Path]:
    from orthomerge.report.report import report

    made = report(run, page, title=recipe.report.title if isinstance(recipe.report, Report) else None)
    return [made.page, *(path for path in sorted(made.files.rglob("*")) if path.is_file())]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
