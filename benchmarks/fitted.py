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
from benchmarks.fitted_jobs import METHODS, PARTS, SPLITS, STARTS, Job, jobs_of
from benchmarks.fitted_sheets import sheets
from benchmarks.suite_table import GRIDS

from orthomerge.alignment.aligners import make_aligner
from orthomerge.data.sampling import few_shot, share
from orthomerge.data.task import Split
from orthomerge.evaluation.evaluate import Bench
from orthomerge.evaluation.scale import search_scale
from orthomerge.features.cache import FeatureCache
from orthomerge.features.features import FeaturePair, Features
from orthomerge.fitting.inputs import Inputs, encoded, prepare
from orthomerge.fitting.stage import Stage
from orthomerge.heads import Classifier, Head
from orthomerge.merged import load, load_head
from orthomerge.merging.methods import make_method
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
        self._stages: dict[str, Stage] = {}
        self._scored: dict[Split, Inputs] = {}

    def stage(self, access: str) -> Stage:
        if access not in self._stages:
            split: Any = SPLITS[access]
            self._stages[access] = Stage(
                self.suite.recipe("task_arithmetic"),
                self.place.folder / "stage",
                self.suite.tasks,
                split,
                self.suite.processor,
                FeatureCache(self.place.folder / "features"),
                device=self.place.device,
                half=self.place.device.startswith("cuda"),
                batch=256,
            )
            if len(self._stages) > 1:  # one encoder is enough
                first = next(iter(self._stages.values()))
                for name in ("model", "encoder", "base", "heads"):
                    self._stages[access].__dict__[name] = getattr(first, name)
        return self._stages[access]

    def scored(self, split: Split) -> Inputs:
        """The inputs of a split that is scored."""
        if split not in self._scored:
            stage = self.stage("inductive")
            examples = {task: self.suite.tasks[task][split] for task in self.suite.tasks}
            nothing = {task: torch.zeros(len(some), 1) for task, some in examples.items()}
            self._scored[split] = prepare(examples, self.suite.processor, nothing, device=stage.encoder.device)
        return self._scored[split]

    def start(self, method: str) -> tuple[str, dict[str, Any]]:
        return self.place.start(method)

    def do(self, job: Job) -> dict[str, Any]:
        started = time.perf_counter()
        stage = self.stage(job.access)
        inputs = self.chosen(stage, job)
        facts: dict[str, Any] = {}
        curve: Sequence[Mapping[str, float]] = ()
        if job.what == "alone" or job.what.startswith("align:"):
            stage.encoder.load(stage.merged(*self.start(job.start or "")))
            classifiers: Mapping[str, Classifier] = stage.heads
            if job.what != "alone":
                classifiers = self.aligned(stage, inputs, job)
        else:
            options = self.options(job)
            method: Any = make_method(job.what, options, tasks=tuple(self.suite.tasks), seed=job.seed)
            made = method.fit(stage.setting(inputs=inputs, seed=job.seed))
            stage.encoder.load(made.weights)
            classifiers, facts, curve = made.classifiers, dict(made.facts), made.curve
        facts.pop("coefficients", None)
        scores = self.scores(stage, classifiers)
        if job.part == SCALES:
            facts["validation"] = fmean(self.scores(stage, classifiers, "val").values())
        extra = sum(
            tensor.numel()
            for each in classifiers.values()
            if not isinstance(each, Head)
            for tensor in each.extra_tensors().values()  # type: ignore[attr-defined]
        )
        return {
            **asdict(job),
            "scores": scores,
            "mean": fmean(scores.values()),
            "extra": extra,
            "inputs": sum(map(len, inputs.rows.values())),
            "seconds": round(time.perf_counter() - started, 1),
            "facts": facts,
            "curve": list(curve),
        }

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

    def chosen(self, stage: Stage, job: Job) -> Inputs:
        """All inputs, so many a class, or a share of them; labels serve to draw alone."""
        inputs = stage.inputs
        if job.shots is None:
            return inputs
        rows = {}
        for task, all_rows in inputs.rows.items():
            labels = self.suite.tasks[task][stage.split].labels
            if job.shots < 1 or labels is None:
                places = share(len(all_rows), job.shots, seed=job.seed)
            else:
                places = few_shot(labels, int(job.shots), seed=job.seed, allow_fewer=True)
            rows[task] = all_rows[torch.as_tensor(np.sort(places))]
        return inputs.only(rows)

    def aligned(self, stage: Stage, inputs: Inputs, job: Job) -> dict[str, Classifier]:
        found = {}
        for task in self.suite.tasks:
            merged = encoded(stage.encoder, inputs, task).cpu()
            expert = inputs.teacher[inputs.rows[task].to(inputs.device)].cpu()
            pair = FeaturePair(Features(merged, task, stage.split), Features(expert, task, stage.split))
            name = job.what.removeprefix("align:")
            options: dict[str, Any] = {"seed": job.seed} if name in ("surgery", "probsurgery", "aligned-c") else {}
            if name != "aligned-c":
                options["device"] = self.place.device
            found[task] = make_aligner(name, options).fit(pair, stage.heads[task]).classifier
        return found

    def scores(self, stage: Stage, classifiers: Mapping[str, Classifier], split: Split = "test") -> dict[str, float]:
        """Accuracy on a split with the weights that the encoder has, in percent."""
        found = {}
        for task in self.suite.tasks:
            features = encoded(stage.encoder, self.scored(split), task).cpu()
            predicted = classifiers[task](features).argmax(1).numpy()
            found[task] = 100 * float((predicted == self.suite.tasks[task][split].labels).mean())
        return found

    def references(self) -> list[dict[str, Any]]:
        """Pre-trained, fine-tuned and multi-task."""
        stage, rows = self.stage("inductive"), []
        stage.encoder.load(stage.base)
        rows.append(("pre-trained", self.scores(stage, stage.heads)))
        whole = self.suite.references()
        for name, title in (("expert", "fine-tuned"), ("mtl", "MTL")):
            if name not in whole:
                continue
            scores = {}
            for task, out in whole[name].models.items():
                encoder = load(out).encoder
                stage.encoder.load(stage.encoder.layout.flat(dict(encoder.named_parameters())))
                features = encoded(stage.encoder, self.scored("test"), task).cpu()
                predicted = load_head(out / "heads" / task)(features).argmax(1).numpy()
                scores[task] = 100 * float((predicted == self.suite.tasks[task]["test"].labels).mean())
            rows.append((title, scores))
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
    bench = Bench(
        suite.tasks,
        suite.processor,
        teachers=suite.references()["expert"].models,
        cache=FeatureCache(suite.folder / "features"),
        device=device,
        batch=256,
    )
    found = dict(scales)
    for method, grid in GRIDS.items():
        if method not in found:
            found[method] = search_scale(suite.recipe(method), bench, grid=grid).best
    return found


def rescaled(jobs: Sequence[Job], masked: Mapping[str, float]) -> list[Job]:
    """With the vector that MOMA masks at a scale of its own."""
    found = []
    for job in jobs:
        scale = masked.get(job.start or "") if job.what == "moma" else None
        found.append(job if scale is None else replace(job, options={**job.options, "options": {"scale": scale}}))
    return found


def encode(first: Worker, jobs: Sequence[Job], scales: Sequence[tuple[str, float]]) -> None:
    """What all processes will want, once and before them: the experts' features, and merges to start from."""
    for job in {job.access: job for job in jobs}.values():
        first.stage(job.access).inputs  # noqa: B018
    for method, options in [*map(first.start, STARTS), *((name, {"scale": scale}) for name, scale in scales)]:
        first.stage("inductive").output(method, options)


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
    encode(first, jobs, [*masked.items(), *((MASKED, scale) for scale in given.moma_grid)])
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
