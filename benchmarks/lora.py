"""LoRA experts on a suite: each merger alone, within KnOTS, and each with realign; and CKA of the experts' updates.

    python benchmarks/lora.py --suite text8 --data ../shared/data [--rank 16] [--workers 5]
    python benchmarks/lora.py --suite digits --rank 8 --faster 3 --seeds 1 --steps 300

Experts are adapters of the attention's projections (alpha = rank), trained at a multiple of the rate of full ones. Jobs
that are in the file of an earlier run are not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run, table
from benchmarks.fitted_jobs import Job
from benchmarks.fitted_work import Place, Worker, scales_of, spread
from benchmarks.lora_cka import KINDS, adapted_share, measure

from orthomerge.evaluation.scale import search_scale
from orthomerge.models.opening import Expert
from orthomerge.suites import digits, eights
from orthomerge.suites.suite import Say, Suite, make_experts
from orthomerge.suites.table import build_suite

GRID = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
TUNING = {"digits": digits.TUNING, "text8": eights.TEXT}
KNOTS = "knots+"
# The share of entries that TIES keeps is of those that the adapters change; drop 0.1 and no trim as KnOTS has it.
OPTIONS: dict[str, dict[str, Any]] = {
    "average": {},
    "task_arithmetic": {},
    "ties": {"density": 0.2},
    "dare": {"drop": 0.5},
    "dare_ties": {"drop": 0.1, "density": 1.0},
    "tsv_m": {},
}
WITHIN = ("task_arithmetic", "ties", "dare", "dare_ties")
SAME = f"{KNOTS}task_arithmetic"  # as task arithmetic: a theorem


@dataclass(frozen=True)
class LoraPlace(Place):
    """As of the fitted merges, but with adapters for experts, in a folder within the suite's own.

    `share`: of the encoder's weights that these change.
    """

    rank: int = 16
    faster: float = 10.0
    share: float = 1.0

    def full(self) -> Suite:
        return Place(self.suite, self.folder.parent, self.data, self.base, self.device, {}, self.text).built()

    def built(self) -> Suite:
        return lora_suite(self.full(), self.rank, self.faster, device=self.device, say=lambda text: None)

    def start(self, method: str) -> tuple[str, dict[str, Any]]:
        name = method.removeprefix(KNOTS)
        options = dict(OPTIONS[name])
        if method in self.scales:
            options["scale"] = self.scales[method]
        if method.startswith(KNOTS):
            return "knots", {"merger": name, **options}
        if options.get("density", 1.0) < 1.0:  # weights that no adapter changes are zeros of the trim
            options["density"] *= self.share
        return name, options


def lora_suite(suite: Suite, rank: int, faster: float, *, device: str, say: Say) -> Suite:
    """The same suite with adapters for experts, in a folder of its own; trains those that are not there."""
    folder, full = suite.folder / f"lora-{rank}-{faster:g}", TUNING[suite.name]
    if not (folder / "base").is_dir():
        shutil.copytree(suite.base, folder / "base")
    made = make_experts(
        replace(suite, folder=folder),
        replace(full, mode="lora", rank=rank, alpha=float(rank), lr=faster * full.lr, device=device),
        root=folder / "experts",
        say=say,
    )
    experts = {task: Expert(str(path), labels=suite.tasks[task].labels) for task, path in made.items()}
    return replace(suite, folder=folder, paths=experts, mtl={})


def cka_of(place: LoraPlace) -> dict[str, dict[str, float]]:
    """CKA of the updates of full and of LoRA experts."""
    return measure(place.full(), place.built())


def jobs_of(seeds: int, steps: int | None) -> list[Job]:
    """Every merger alone and within KnOTS, and each of these with realign (seeds)."""
    starts = [*OPTIONS, *(KNOTS + name for name in WITHIN)]
    options = {} if steps is None else {"steps": steps}
    alone = [Job("lora", start, "alone", start=start) for start in starts]
    fitted = [start for start in starts if start != SAME]
    return alone + [
        Job("lora", start, "realign", start=start, options=options, seed=seed)
        for start in fitted
        for seed in range(seeds)
    ]


def sheet(rows: Sequence[Mapping[str, Any]], references: Mapping[str, float], scales: Mapping[str, float]) -> str:
    """A line for every merger: alone, within KnOTS, and both with realign."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["start"], row["what"]), []).append(row["mean"])

    def cell(start: str, what: str) -> str:
        means = found.get((start, what), [])
        scale = f" ({scales[start]:g})" if what == "alone" and start in scales else ""
        return f"{fmean(means):.1f}" + (f" ± {stdev(means):.1f}" if len(means) > 1 else "") + scale if means else ""

    lines = [
        [name, cell(name, "alone"), cell(KNOTS + name, "alone"), cell(name, "realign"), cell(KNOTS + name, "realign")]
        for name in OPTIONS
    ]
    header = ("merger", "alone (scale)", "w/ KnOTS (scale)", "w/ realign", "w/ KnOTS and realign")
    whole = table(("reference", "mean"), [[name, f"{value:.1f}"] for name, value in references.items()])
    return f"{whole}\n\n{table(header, lines)}"


def scale_of(place: LoraPlace, start: str) -> float:
    """The best scale of a merger on validation data."""
    suite, (method, options) = place.built(), place.start(start)
    encoding = suite.encoding(place.device, batch=256)
    search = search_scale(
        suite.experts, method, suite.tasks, options, grid=GRID, criterion="accuracy", encoding=encoding
    )
    return search.best


def chosen_scales(place: LoraPlace, workers: int, say: Say) -> dict[str, float]:
    """Each merger's scale on validation data; an average has none, and KnOTS + task arithmetic is task arithmetic."""
    found = dict(place.scales)
    starts = [*OPTIONS, *(KNOTS + name for name in WITHIN)]
    left = [start for start in starts if start not in (*found, "average", SAME)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for start, scale in zip(left, pool.map(partial(scale_of, place), left), strict=True):
            found[start] = scale
            say(f"{start}: scale {scale:g}")
    return {**found, SAME: found["task_arithmetic"]}


def references_of(worker: Worker, full: Suite, place: Place) -> dict[str, float]:
    """Pre-trained, LoRA experts, full experts, multi-task."""
    lora = {row["row"]: row["mean"] for row in worker.references()}
    plain = Place(place.suite, full.folder, place.data, place.base, place.device, {}, place.text)
    whole = {row["row"]: row["mean"] for row in Worker(plain).references()}
    return {
        "pre-trained under the LoRA heads": lora["pre-trained"],
        "fine-tuned by LoRA": lora["fine-tuned"],
        "fine-tuned in full": whole["fine-tuned"],
        **({"MTL in full": whole["MTL"]} if "MTL" in whole else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=list(TUNING), required=True)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--faster", type=float, default=10.0, help="learning rate, in multiples of the full experts'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of realign (its own)")
    parser.add_argument("--scale", action="append", default=[], metavar="MERGER=SCALE", help="instead of a search")
    parser.add_argument("--minutes", type=float, default=600.0, help="write what is done after so many")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    folder = arguments.folder or ROOT / "runs" / arguments.suite
    made = {"folder": folder, "data": arguments.data, "base": arguments.base, "device": arguments.device}
    full = build_suite(arguments.suite, **made, say=say)
    suite = lora_suite(full, arguments.rank, arguments.faster, device=arguments.device, say=say)
    suite.references()  # once, before all processes want them
    share = adapted_share(suite)
    say(f"the adapters change {share:.1%} of the encoder's weights")
    text = next(iter(suite.tasks.values())).modality == "text"
    at = (arguments.suite, suite.folder, arguments.data, arguments.base, arguments.device)
    place = LoraPlace(*at, {}, text, rank=arguments.rank, faster=arguments.faster, share=share)
    beside = ProcessPoolExecutor(1, get_context("spawn"))
    alike = beside.submit(cka_of, place)  # on the CPU, while merges are measured
    file = arguments.results / f"lora-{arguments.suite}-{arguments.rank}-{arguments.faster:g}.jsonl"
    arguments.results.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    old: dict[str, float] = next((row["scales"] for row in done if "scales" in row), {})
    wanted = scales_of(arguments.scale)
    if old and {**old, **wanted} != old:
        raise SystemExit(f"the merges in {file} have other scales than those given; move it away, or leave out --scale")
    place = replace(place, scales=chosen_scales(replace(place, scales=old or wanted), arguments.workers, say))
    if not old:
        with file.open("a") as out:
            out.write(json.dumps({"scales": place.scales}) + "\n")
    rows = [row for row in done if "scales" not in row]
    first = Worker(place)
    first.encode_experts("inductive")  # once, before all processes want them
    references = references_of(first, full, place)
    say("experts are encoded")

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        say(f"{row['start']} {row['what']} seed {row['seed']}: {row['mean']:.2f} ({row['seconds']} s)")

    known = {Job(**{name: row[name] for name in Job.__dataclass_fields__}).key for row in rows}
    left = [job for job in jobs_of(arguments.seeds, arguments.steps) if job.key not in known]
    if arguments.workers > 1:
        spread(place, left, arguments.workers, started + 60 * arguments.minutes, keep)
    else:
        for job in left:
            if time.monotonic() - started < 60 * arguments.minutes:
                keep(first.do(job))
    write(arguments, sheet(rows, references, place.scales), alike.result(), share)
    beside.shutdown()
    say("done")


def write(arguments: argparse.Namespace, merges: str, alike: Mapping[str, Mapping[str, float]], share: float) -> None:
    layers = list(alike[KINDS[0]])
    lines = [[layer, *(f"{alike[kind][layer]:.2f}" for kind in KINDS)] for layer in layers]
    lines.append(["mean", *(f"{fmean(alike[kind].values()):.2f}" for kind in KINDS)])
    about = (
        f"Adapters of rank {arguments.rank} on the attention's projections, {share:.1%} of the encoder's weights, "
        f"trained at {arguments.faster:g} times the rate of the full experts. Mean accuracy of all tasks in percent on "
        f"the test split; scales {'given' if arguments.scale else 'chosen by normalised accuracy on validation data'}; "
        "realign is "
        "fitted to unlabelled training inputs (±: deviation over seeds). ties keeps a fifth of what the adapters "
        "change, dare drops half, dare_ties a tenth and trims nothing."
    )
    cka = (
        "Mean unbiased CKA over pairs of experts of what their updates make of the same inputs of the layer (hidden "
        "states of the base on test inputs of all tasks). KnOTS turns the updates into one basis, which CKA does not "
        "see: with their singular values, the parts have the CKA of the updates. *V alone*: without them."
    )
    page = (
        f"# LoRA experts on {arguments.suite}\n\n{about}\n\n{describe_run()}\n\n## Merges\n\n{merges}\n\n"
        f"## How alike the experts' updates are\n\n{cka}\n\n{table(('layer', *KINDS), lines)}\n"
    )
    (arguments.results / f"lora-{arguments.suite}.md").write_text(page)
    print(page, flush=True)


if __name__ == "__main__":
    main()
