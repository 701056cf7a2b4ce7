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
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from benchmarks.environments import describe_run, table  # noqa: E402

from orthomerge.alignment.aligners import make_aligner  # noqa: E402
from orthomerge.data.sampling import few_shot, share  # noqa: E402
from orthomerge.evaluation.evaluate import Bench  # noqa: E402
from orthomerge.evaluation.scale import search_scale  # noqa: E402
from orthomerge.features.cache import FeatureCache  # noqa: E402
from orthomerge.features.features import FeaturePair, Features  # noqa: E402
from orthomerge.fitting.inputs import Inputs, encoded, prepare  # noqa: E402
from orthomerge.fitting.stage import Stage  # noqa: E402
from orthomerge.heads import Classifier, Head  # noqa: E402
from orthomerge.merged import load, load_head  # noqa: E402
from orthomerge.merging.methods import make_method  # noqa: E402
from orthomerge.suites.suite import Suite  # noqa: E402
from orthomerge.suites.table import build_suite  # noqa: E402

STARTS = ("average", "task_arithmetic", "ties")
GRIDS = {
    "task_arithmetic": [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5],
    "ties": [0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0],
}
SPLITS = {"inductive": "train", "transductive": "test"}
PARTS = ("inductive", "transductive", "few", "ablation", "masking", "efficiency")


@dataclass(frozen=True)
class Job:
    """One row and seed. `what`: alone, an aligner, or a fitted method; `shots`: inputs a class, or a share, or all."""

    part: str
    row: str
    what: str
    access: str = "inductive"
    start: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shots: float | None = None
    seed: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def jobs_of(parts: Sequence[str], seeds: int, steps: int | None) -> list[Job]:
    """All jobs of some parts, one with each seed; `steps`: of every loop."""
    quick = {} if steps is None else {"steps": steps}
    wanted: list[Job] = []
    for part in parts:
        wanted += _main(part) if part in SPLITS else {"few": _few, **_ANALYSES}[part]()
    found = {}
    for job in wanted:
        options = {**_SHORTER.get(job.what, {}), **(quick if job.what in _LOOPS else {}), **job.options}
        for seed in range(1 if job.what in ("alone", "align:auto") and job.shots is None else seeds):
            made = replace(job, options=options, seed=seed)
            found[made.key] = made
    return list(found.values())


_LOOPS = ("concrete_am", "concrete_ta", "adamerging", "moma", "realign")
_SHORTER: dict[str, dict[str, Any]] = {  # than published, for there are many rows
    "concrete_ta": {"steps": 500},
    "concrete_am": {"steps": 250},
    "fisher": {"inputs": 64},
}


def _main(access: str) -> list[Job]:
    """Tables 2 and 3 of the paper; the long ones first."""
    found = [
        Job(access, f"{start} w/ {title}", what, access=access, start=start)
        for start in STARTS
        for what, title in (("realign", "realign"), ("moma", "MOMA"))
    ]
    others: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("Concrete AdaMerging", "concrete_am", {}),
        ("Concrete TA", "concrete_ta", {}),
        ("Fisher", "fisher", {}),
        ("AdaMerging TW", "adamerging", {"by": "task"}),
        ("AdaMerging LW", "adamerging", {}),
        ("AdaMerging++ LW", "adamerging", {"vectors": "ties"}),
        ("RegMean", "regmean", {}),
        ("RegMean++", "regmean_pp", {}),
        ("LM-Cocktail", "lm_cocktail", {}),
        ("Model Tailor", "model_tailor", {"scale": 0.3}),
    )
    found += [Job(access, row, what, access=access, options=options) for row, what, options in others]
    for start in STARTS:
        found.append(Job(access, start, "alone", access=access, start=start))
        for aligner, title in (("surgery", "Surgery"), ("probsurgery", "ProbSurgery"), ("auto", "heads by auto")):
            found.append(Job(access, f"{start} w/ {title}", f"align:{aligner}", access=access, start=start))
    return found


def _few() -> list[Job]:
    ways = {
        "realign": "realign",
        "MOMA": "moma",
        "heads by auto": "align:auto",
        "Surgery": "align:surgery",
        "aligned-c": "align:aligned-c",
    }
    start, found = "task_arithmetic", []
    for shots in (20.0, 5.0, 1.0):
        found += [Job("few", f"{start} w/ {title}", what, start=start, shots=shots) for title, what in ways.items()]
        found += [Job("few", "AdaMerging LW", "adamerging", shots=shots), Job("few", "RegMean", "regmean", shots=shots)]
    variants: dict[str, dict[str, Any]] = {
        "no mixtures": {"copies": 0},
        "mask": {"gates": "mask"},
        "row": {"gates": "row"},
        "component": {"gates": "component"},
    }
    for title, options in variants.items():
        found.append(Job("few", f"{start} w/ realign: {title}", "realign", start=start, options=options, shots=20.0))
    return found


def _ablation() -> list[Job]:
    ours = {
        "realign: free": {"gates": "free"},
        "realign: mask": {"gates": "mask"},
        "realign: row": {"gates": "row"},
        "realign: component": {"gates": "component"},
        "realign: free, the experts' heads": {"read_by": "expert"},
    }
    theirs: dict[str, dict[str, Any]] = {
        "orthogonal": {"mask": "none"},
        "mask": {"transform": "none"},
        "orthogonal + mask (MOMA)": {},
        "similarity + mask": {"transform": "similarity"},
        "linear": {"mask": "none", "transform": "linear"},
        "linear + mask": {"transform": "linear"},
        "orthogonal + mask, not projected": {"project": False},
        "orthogonal + hard mask": {"mask": "hard"},
        "orthogonal + mask, cap 4": {"cap": 4.0},
    }
    found = [Job("ablation", row, "realign", start="task_arithmetic", options=dict(each)) for row, each in ours.items()]
    return found + [
        Job("ablation", row, "moma", access=access, start="task_arithmetic", options=dict(each))
        for row, each in theirs.items()
        for access in SPLITS
    ]


def _masking() -> list[Job]:
    return [
        Job("masking", f"{decay:g}", "moma", start="task_arithmetic", options={"decay": decay})
        for decay in (0.0, 5e-9, 5e-8, 1e-7, 3e-7, 1e-6, 3e-6)
    ]


def _efficiency() -> list[Job]:
    return [
        Job("efficiency", what, what, access=access, start="task_arithmetic", shots=shots)
        for shots in (None, 0.5, 0.1)
        for access in SPLITS
        for what in ("realign", "moma")
    ]


_ANALYSES = {"ablation": _ablation, "masking": _masking, "efficiency": _efficiency}


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


class Worker:
    """Does jobs, one after the other, in one process."""

    def __init__(self, place: Place) -> None:
        self.place, self.suite = place, place.built()
        self._stages: dict[str, Stage] = {}

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

    @cached_property
    def test(self) -> Inputs:
        stage = self.stage("inductive")
        examples = {task: self.suite.tasks[task]["test"] for task in self.suite.tasks}
        nothing = {task: torch.zeros(len(some), 1) for task, some in examples.items()}
        return prepare(examples, self.suite.processor, nothing, device=stage.encoder.device)

    def start(self, method: str) -> tuple[str, dict[str, Any]]:
        scale = self.place.scales.get(method)
        return method, {} if scale is None else {"scale": scale}

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
            found |= {"start": method, "options": options}
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
            options = {"seed": job.seed} if name in ("surgery", "probsurgery") else {}
            found[task] = make_aligner(name, options).fit(pair, stage.heads[task]).classifier
        return found

    def scores(self, stage: Stage, classifiers: Mapping[str, Classifier]) -> dict[str, float]:
        """Accuracy on the test split with the weights that the encoder has, in percent."""
        found = {}
        for task in self.suite.tasks:
            features = encoded(stage.encoder, self.test, task).cpu()
            predicted = classifiers[task](features).argmax(1).numpy()
            found[task] = 100 * float((predicted == self.suite.tasks[task]["test"].labels).mean())
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
                features = encoded(stage.encoder, self.test, task).cpu()
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


def sheets(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> str:
    """The tables of all parts."""
    titles = {
        "references": "References",
        "inductive": "Inductive: all unlabelled training inputs, scored on test",
        "transductive": "Transductive: the unlabelled test inputs themselves, as the papers do",
        "few": "Inductive, few inputs a class",
        "ablation": "Ablation (Table 4 of the paper)",
        "masking": "Masking rate against accuracy (Figure 8): by the weight of the mask's penalty",
        "efficiency": "Data efficiency (Table 5)",
    }
    parts = []
    for part, title in titles.items():
        mine = [row for row in rows if row["part"] == part]
        if mine:
            parts.append(f"### {title}\n\n{_sheet(part, mine, tasks)}")
    return "\n\n".join(parts)


def _sheet(part: str, rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> str:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["row"], row.get("access"), row.get("shots")), []).append(row)
    lines = []
    for (name, access, shots), same in sorted(groups.items(), key=lambda item: _order(part, item[0])):
        means = [row["mean"] for row in same]
        spread_ = f" ± {stdev(means):.1f}" if len(means) > 1 else ""
        cells = [f"{fmean(row['scores'][task] for row in same):.1f}" for task in tasks]
        line = [name]
        if part in ("ablation", "efficiency"):
            line.append(str(access))
        if part in ("few", "efficiency"):
            line.append("all" if shots is None else f"{shots:.0%}" if shots < 1 else f"{shots:g} a class")
        if part in ("masking", "ablation"):
            masked = [row["facts"]["masked"] for row in same if "masked" in row.get("facts", {})]
            line.append(f"{100 * fmean(masked):.0f} %" if masked else "")
        line += [*cells, f"**{fmean(means):.1f}**{spread_}", str(len(same)), f"{same[0]['extra']:,}"]
        seconds = [row["seconds"] for row in same if "seconds" in row]
        line.append(f"{fmean(seconds):.0f}" if seconds else "")
        lines.append(line)
    heads = [{"masking": "penalty"}.get(part, "method")]
    if part in ("ablation", "efficiency"):
        heads.append("access")
    if part in ("few", "efficiency"):
        heads.append("inputs")
    if part in ("masking", "ablation"):
        heads.append("masked")
    return table([*heads, *tasks, "mean", "seeds", "extra parameters", "s"], lines)


def _order(part: str, key: tuple[Any, ...]) -> tuple[Any, ...]:
    name, access, shots = key
    first = [
        "pre-trained", "fine-tuned", "MTL", "LM-Cocktail", "Model Tailor", "Fisher", "RegMean", "RegMean++",
        "Concrete TA", "Concrete AdaMerging", "AdaMerging TW", "AdaMerging LW", "AdaMerging++ LW",
    ]  # fmt: skip
    size = 1e9 if shots is None else float(shots)
    if part in ("few", "efficiency"):
        return (access or "", size, name)
    if part == "masking":
        return (float(name),)
    return (access or "", first.index(name) if name in first else len(first), 0 if part == "ablation" else name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=["digits", "text8", "vision8"], required=True)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--scale", action="append", default=[], metavar="METHOD=SCALE", help="instead of a search")
    parser.add_argument("--steps", type=int, help="of every loop (each method's own)")
    parser.add_argument("--minutes", type=float, default=600.0, help="write what is done after so many")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
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
        workers=min(given.workers, 4),
    )
    scales = {method: float(scale) for method, scale in (text.split("=") for text in given.scale)}
    if len(scales) < len(GRIDS):
        bench = Bench(
            suite.tasks,
            suite.processor,
            teachers=suite.references()["expert"].models,
            cache=FeatureCache(folder / "features"),
            device=given.device,
            batch=256,
        )
        for method, grid in GRIDS.items():
            scales.setdefault(method, search_scale(suite.recipe(method), bench, grid=grid).best)
    say(f"scales: {scales}")
    text = next(iter(suite.tasks.values())).modality == "text"
    place = Place(given.suite, folder, given.data, given.base, given.device, scales, text)
    first = Worker(place)
    rows = first.references()
    file = given.results / f"fitted-{given.suite}.jsonl"
    given.results.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    jobs = jobs_of(given.parts, given.seeds, given.steps)
    known = {Job(**{name: row[name] for name in Job.__dataclass_fields__}).key for row in done}
    for job in {job.access: job for job in jobs}.values():
        first.stage(job.access).inputs  # noqa: B018 - experts are encoded once, before all processes want them
    for method in STARTS:
        first.stage("inductive").output(*first.start(method))
    say("experts are encoded")

    def keep(row: dict[str, Any]) -> None:
        done.append(row)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        shots = "" if row["shots"] is None else f" {row['shots']:g}"
        say(f"{row['part']}: {row['row']}{shots} seed {row['seed']}: {row['mean']:.2f} ({row['seconds']} s)")

    left = [job for job in jobs if job.key not in known]
    if given.workers > 1:
        spread(place, left, given.workers, started + 60 * given.minutes, keep)
    else:
        for job in left:
            if time.monotonic() - started < 60 * given.minutes:
                keep(first.do(job))
    tables = sheets([*rows, *done], list(suite.tasks))
    about = (
        f"Accuracy in percent on the test split; mean ± standard deviation over seeds (order of inputs, draws of few, "
        f"and whatever a method draws). Scales {'given' if given.scale else 'chosen on validation data'}: "
        f"{', '.join(f'{method} {scale:g}' for method, scale in scales.items())}; average has none. Loss curves: "
        f"`fitted-{given.suite}.jsonl` of the run."
    )
    page = f"# Fitted merges on {given.suite}\n\n{about}\n\n{describe_run()}\n\n## Result\n\n{tables}\n"
    (given.results / f"fitted-{given.suite}.md").write_text(page)
    print(tables, flush=True)
    say("done")


if __name__ == "__main__":
    main()
