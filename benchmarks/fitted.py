"""Fitted merges on a suite, in the layout of MOMA's Tables 2 to 5: every learned merge, inductive and transductive.

    python benchmarks/fitted.py --suite text8 --data ../shared/data [--workers 5] [--parts inductive few ...]

Jobs are spread over processes that share the GPU (a step of a small encoder costs what Python costs); each is one fit
with one seed, and scores the test split in float32. Jobs that are in the file of an earlier run are not done again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run
from benchmarks.fitted_jobs import METHODS, PARTS, SCALES, Job, jobs_of
from benchmarks.fitted_sheets import sheets
from benchmarks.fitted_work import Place, Worker, scales_of, spread
from benchmarks.suite import GRIDS

from orthomerge.evaluation.scale import search_scale
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import build_suite

MASKED = "task_arithmetic"  # the vector whose scale is chosen for MOMA

ABOUT = """\
Accuracy in percent on the test split; mean ± standard deviation over seeds (order of inputs, draws of few, and whatever
a method draws)."""


def searched(suite: Suite, scales: Mapping[str, float], device: str) -> dict[str, float]:
    """These, and the best on validation data of methods that have none."""
    experts, encoding, chosen = suite.experts, suite.encoding(device, batch=256), dict(scales)
    for method, grid in GRIDS.items():
        if method not in chosen:
            search = search_scale(experts, method, suite.tasks, grid=grid, criterion="accuracy", encoding=encoding)
            chosen[method] = search.best
    return chosen


def rescaled(jobs: Sequence[Job], masked: Mapping[str, float]) -> list[Job]:
    """With the vector that MOMA masks at a scale of its own."""
    found = []
    for job in jobs:
        scale = masked.get(job.start or "") if job.what == "moma" else None
        found.append(job if scale is None else replace(job, options={**job.options, "options": {"scale": scale}}))
    return found


def scale_jobs(grid: Sequence[float], steps: int | None) -> list[Job]:
    """MOMA at each of these scales."""
    more = {} if steps is None else {"steps": steps}
    return [
        Job(SCALES, f"{scale:g}", "moma", start=MASKED, options={"options": {"scale": scale}, **more}) for scale in grid
    ]


def best_scale(rows: Sequence[Mapping[str, Any]]) -> float:
    """With which MOMA is best on validation data."""
    tried = [row for row in rows if row["part"] == SCALES]
    return float(max(tried, key=lambda row: float(row["facts"]["validation"]))["options"]["options"]["scale"])


def done_before(file: Path) -> list[dict[str, Any]]:
    """The fits of earlier runs."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def named(scales: Mapping[str, float]) -> str:
    return ", ".join(f"{method} {scale:g}" for method, scale in scales.items())


def words(
    given: argparse.Namespace, scales: Mapping[str, float], masked: Mapping[str, float], older: int, fits: int
) -> str:
    """What the reader of a page must know; `older`: fits that were there before."""
    found = [
        ABOUT,
        f"Scales {'given' if given.scale else 'chosen on validation data'}: {named(scales)}; average has none.",
    ]
    if masked:
        chosen = ", chosen by its accuracy on validation data" if given.moma_grid else ""
        found.append(f"MOMA masks a vector of a scale of its own{chosen}: {named(masked)}.")
    if older:
        found.append(f"{older} of {fits} fits are from earlier runs of this command.")
    found.append(f"Loss curves: `fitted-{given.suite}.jsonl` of the run.")
    return " ".join(found)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=["digits", "text8", "vision8"], required=True)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    methods: dict[str, Any] = {"nargs": "+", "choices": METHODS, "default": [], "metavar": "METHOD"}
    parser.add_argument("--methods", **methods, help="only rows of these (all)")
    parser.add_argument("--without", **methods, help="rows that are left for another run")
    parser.add_argument("--scale", action="append", default=[], metavar="METHOD=SCALE", help="instead of a search")
    parser.add_argument(
        "--moma-scale",
        action="append",
        default=[],
        metavar="METHOD=SCALE",
        help="of the vector that MOMA masks, which a mask can only make shorter (that of the merge alone)",
    )
    parser.add_argument(
        "--moma-grid",
        type=float,
        nargs="+",
        default=[],
        metavar="SCALE",
        help="of the vector of task arithmetic: that with which MOMA is best on validation data",
    )
    parser.add_argument("--analysis-seeds", type=int, help="of ablation and efficiency (as --seeds)")
    parser.add_argument("--steps", type=int, help="of every loop (each method's own)")
    parser.add_argument("--minutes", type=float, default=600.0, help="write what is done after so many")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main() -> None:
    given = parsed()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    folder = given.folder or ROOT / "runs" / given.suite
    suite = build_suite(given.suite, folder=folder, data=given.data, base=given.base, device=given.device, say=say)
    scales, masked = scales_of(given.scale), scales_of(given.moma_scale)
    if len(scales) < len(GRIDS):
        scales = searched(suite, scales, given.device)
    say(f"scales: {scales}")
    text = next(iter(suite.tasks.values())).modality == "text"
    place = Place(given.suite, folder, given.data, given.base, given.device, scales, text)
    first = Worker(place)
    rows = first.references()
    file = given.results / f"fitted-{given.suite}.jsonl"
    given.results.mkdir(parents=True, exist_ok=True)
    done = done_before(file)
    older = len(done)
    jobs = jobs_of(
        given.parts,
        given.seeds,
        given.steps,
        analyses=given.analysis_seeds,
        only=given.methods,
        without=given.without,
    )
    known = {Job(**{name: row[name] for name in Job.__dataclass_fields__}).key for row in done}
    tried = scale_jobs(given.moma_grid, given.steps)
    for access in dict.fromkeys(job.access for job in jobs):
        first.encode_experts(access)
    say("experts are encoded")

    def keep(row: dict[str, Any]) -> None:
        done.append(row)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        shots = "" if row["shots"] is None else f" {row['shots']:g}"
        say(f"{row['part']}: {row['row']}{shots} seed {row['seed']}: {row['mean']:.2f} ({row['seconds']} s)")

    def run(some: Sequence[Job]) -> None:
        left = [job for job in some if job.key not in known]
        if given.workers > 1:
            spread(place, left, given.workers, started + 60 * given.minutes, keep)
            return
        for job in left:
            if time.monotonic() - started < 60 * given.minutes:
                keep(first.do(job))

    if tried:
        run(tried)
        masked[MASKED] = best_scale(done)
        say(f"MOMA is best on validation data from task arithmetic at {masked[MASKED]:g}")
    run(rescaled(jobs, masked))
    tables = sheets([*rows, *done], list(suite.tasks))
    about = words(given, scales, masked, older, len(done))
    page = f"# Fitted merges on {given.suite}\n\n{about}\n\n{describe_run()}\n\n## Result\n\n{tables}\n"
    (given.results / f"fitted-{given.suite}.md").write_text(page)
    print(tables, flush=True)
    say("done")


if __name__ == "__main__":
    main()
