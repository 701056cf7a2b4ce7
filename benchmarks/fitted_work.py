"""How `fitted.py` does its jobs: one after the other in a process, or spread over several."""

from __future__ import annotations

import os
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
from benchmarks.fitted_jobs import SCALES, SPLITS, Job

from orthomerge.alignment.align import align
from orthomerge.data.task import Split, Task, few_shot, share
from orthomerge.evaluation.evaluate import extra_numbers
from orthomerge.evaluation.metrics import hits, predict
from orthomerge.fitting.fit import fit
from orthomerge.models.encoding import encode
from orthomerge.models.model import Model
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import build_suite


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
