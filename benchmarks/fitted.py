"""Fitted merges on a suite, in the layout of MOMA's Tables 2 to 5: every learned merge, inductive and transductive.

    python benchmarks/fitted.py --suite text8 --data ../shared/data [--workers 5] [--parts inductive few ...]

Jobs are spread over processes that share the GPU (a step of a small encoder costs what Python costs); each is one fit
with one seed, and scores the test split in float32. Jobs that are in the file of an earlier run are not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run
from benchmarks.fitted_jobs import METHODS, PARTS, SPLITS, Job, jobs_of
from benchmarks.fitted_sheets import sheets
from benchmarks.suite import GRIDS

from orthomerge.alignment.align import align
from orthomerge.data.task import Split, Task, few_shot, share
from orthomerge.evaluation.evaluate import extra_numbers
from orthomerge.evaluation.metrics import hits, predict
from orthomerge.evaluation.scale import search_scale
from orthomerge.fitting.fit import fit
from orthomerge.models.encoding import encode
from orthomerge.models.model import Model
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import build_suite

SCALES, MASKED = "scales", "task_arithmetic"  # the part in which a scale is chosen for MOMA, and whose

ABOUT = """\
Accuracy in percent on the test split; mean ± standard deviation over seeds (order of inputs, draws of few, and whatever
a method draws)."""


@dataclass(frozen=True)
class Place:
    """What a process needs to do jobs: the suite on disk, and the scales that were chosen."""

    suite: str
    folder: Path
    data: Path | None
    base: str | None
    device: str
    scales: dict[str, float]
    text: bool

    def built(self) -> Suite:
        return build_suite(
            self.suite, folder=self.folder, data=self.data, base=self.base, device=self.device, say=lambda text: None
        )

    def start(self, method: str) -> tuple[str, dict[str, Any]]:
        """A merge to start from, with the scale that was chosen."""
        scale = self.scales.get(method)
        return method, {} if scale is None else {"scale": scale}


class Worker:
    """Does jobs, one after the other, in one process."""

    def __init__(self, place: Place) -> None:
        self.place, self.suite = place, place.built()
        self.experts = self.suite.experts
        self.encoding = self.suite.encoding(place.device, batch=256)
        self.uncached = replace(self.encoding, cache=None)  # a fit is scored once

    def start(self, method: str) -> tuple[str, dict[str, Any]]:
        return self.place.start(method)

    def encode_experts(self, access: str) -> None:
        """Fill the cache with what the experts make of the inputs that are fitted to."""
        for task, data in self.suite.tasks.items():
            encode(self.experts.teacher(task), data[SPLITS[access]], task=task, how=self.encoding)

    def do(self, job: Job) -> dict[str, Any]:
        started = time.perf_counter()
        inputs = self.chosen(job)
        model = self.model(job, inputs)
        about = model.origin.facts.get("fit", {})
        facts = dict(about.get("facts", {}))
        facts.pop("coefficients", None)
        scores = self.scores(dict.fromkeys(model.tasks, model))
        if job.part == SCALES:
            facts["validation"] = fmean(self.scores(dict.fromkeys(model.tasks, model), "val").values())
        return {
            **asdict(job),
            "scores": scores,
            "mean": fmean(scores.values()),
            "extra": sum(map(extra_numbers, model.heads.values())),
            "inputs": sum(len(data[SPLITS[job.access]]) for data in inputs.values()),
            "seconds": round(time.perf_counter() - started, 1),
            "facts": facts,
            "curve": about.get("curve", []),
        }

    def model(self, job: Job, inputs: Mapping[str, Task]) -> Model:
        """A merge as it is, with aligned heads, or fitted."""
        split = SPLITS[job.access]
        if job.what != "alone" and not job.what.startswith("align:"):
            return fit(
                self.experts,
                job.what,
                inputs,
                self.options(job),
                seed=job.seed,
                device=self.place.device,
                split=split,
                encoding=self.encoding,
            )
        merged = self.suite.merged(*self.start(job.start or ""))
        if job.what == "alone":
            return merged
        name = job.what.removeprefix("align:")
        options = {} if name == "aligned-c" else {"device": self.place.device}
        return align(
            merged,
            inputs,
            aligner=name,
            options=options,
            experts=self.experts,
            split=split,
            seed=job.seed,
            encoding=self.encoding,
        )

    def options(self, job: Job) -> dict[str, Any]:
        """Those of the method: text or pictures as the paper has it, the start and its scale."""
        found = dict(job.options)
        if job.what == "moma" and self.place.text:
            found = {"batch": 24, "map_lr": 5e-4, **found}
        if job.what in ("moma", "realign") and job.start is not None:
            method, options = self.start(job.start)
            found = {"start": method, "options": options, **found}
        if job.what in ("adamerging", "concrete_ta", "concrete_am") and "task_arithmetic" in self.place.scales:
            key = "scale" if job.what == "concrete_ta" else "start"
            found.setdefault(key, self.place.scales["task_arithmetic"])
        return found

    def chosen(self, job: Job) -> dict[str, Task]:
        """All inputs, so many per class, or a share of them; labels serve to draw alone."""
        split = SPLITS[job.access]
        tasks = {}
        for task, data in self.suite.tasks.items():
            examples = data[split]
            if job.shots is not None:
                if job.shots < 1 or examples.labels is None:
                    places = share(len(examples), job.shots, seed=job.seed)
                else:
                    places = few_shot(examples.labels, int(job.shots), seed=job.seed, allow_fewer=True)
                examples = examples.take(np.sort(places))
            tasks[task] = replace(data, splits={split: examples})
        return tasks

    def scores(self, models: Mapping[str, Model], split: Split = "test") -> dict[str, float]:
        """Accuracy of each task's model on a split, in percent."""
        scores = {}
        for task, model in models.items():
            features = encode(model, self.suite.tasks[task][split], task=task, how=self.uncached)
            if features.labels is None:
                raise SystemExit(f"the {split} split of {task!r} has no labels")
            predicted = predict(model.head(task), features.values)
            scores[task] = 100 * float(hits(predicted, features.labels).float().mean())
        return scores

    def references(self) -> list[dict[str, Any]]:
        """Pre-trained, fine-tuned and multi-task."""
        subjects = self.suite.references()
        titles = {"base": "pre-trained", "expert": "fine-tuned", "mtl": "MTL"}
        rows = [(title, self.scores(subjects[name].models)) for name, title in titles.items() if name in subjects]
        return [
            {"part": "references", "row": title, "scores": scores, "mean": fmean(scores.values()), "extra": 0}
            for title, scores in rows
        ]


_WORKER: list[Worker] = []


def begin(place: Place, threads: int) -> None:
    torch.set_num_threads(threads)
    _WORKER.append(Worker(place))


def do(job: Job) -> dict[str, Any]:
    return _WORKER[0].do(job)


def spread(
    place: Place, jobs: Sequence[Job], workers: int, until: float, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Do jobs in processes until there are none left, or the time is up."""
    threads = max((os.cpu_count() or 1) // workers, 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), begin, (place, threads)) as pool:
        promised = {pool.submit(do, job): job for job in jobs}
        try:
            for future in as_completed(promised, timeout=max(until - time.monotonic(), 1)):
                if (error := future.exception()) is not None:
                    print(f"FAILED {promised[future]}: {error!r}", flush=True)
                else:
                    keep(future.result())
        except TimeoutError:
            left = sum(not future.done() for future in promised)
            print(f"time is up: {left} jobs are left", flush=True)
            for future in promised:
                future.cancel()
            for process in list((pool._processes or {}).values()):  # noqa: SLF001
                process.kill()


def scales_of(given: Sequence[str]) -> dict[str, float]:
    """Of METHOD=SCALE."""
    return {method: float(scale) for method, scale in (text.split("=") for text in given)}


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
    suite = build_suite(
        given.suite,
        folder=folder,
        data=given.data,
        base=given.base,
        device=given.device,
        say=say,
    )
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
