"""Many merges in a row, runs and sweeps that are killed, and many jobs at once: nothing leaks, every output is whole.

A process that has everything loaded makes merges one after another, in itself (files, descriptors and memory are
counted there) and in forks of it that are killed at random moments. A run and a sweep are killed at ten moments each
and go on. Then jobs run side by side in processes of a pool.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # tests.faults.tiny makes the models

from benchmarks.environments import describe_run, table, write_result  # noqa: E402

_TEXT = """
Merges of two tiny BERTs (a few kB): what is looked for are leaks, not speed. Every fourth merge is made by a child that
is killed with SIGKILL at a random moment; whatever it leaves, the next merge into the same place must clear away.
"""


@dataclass(frozen=True)
class Soaked:
    """`resident` and `descriptors`: of the process, after every merge of its own; `left`: files beside the output."""

    merges: int
    killed: int
    seconds: float
    resident: list[int]
    descriptors: list[int]
    left: list[str]
    wrong: list[str]

    @property
    def growth(self) -> float:
        """Bytes of memory a merge, by least squares over the second half."""
        rows = self.resident[len(self.resident) // 2 :]
        middle, mean = (len(rows) - 1) / 2, sum(rows) / len(rows)
        spread = sum((place - middle) ** 2 for place in range(len(rows))) or 1.0
        return sum((place - middle) * (value - mean) for place, value in enumerate(rows)) / spread


def soak(folder: Path, count: int, *, seed: int = 0, say: Callable[[str], None] = print) -> Soaked:
    """`count` merges in `folder`, all into the same two places."""
    import gc

    from tests.faults.tiny import TASKS, write_experts

    from orthomerge.models.saved import verify_folder as verify
    from orthomerge.runs.models import write
    from orthomerge.runs.recipe import Recipe

    models, place, draw = write_experts(folder / "models"), folder / "place", random.Random(seed)
    recipe = Recipe({task: str(models / task) for task in TASKS}, base=str(models / "base"), method="ties")
    place.mkdir()
    resident, descriptors, wrong, killed, started = [], [], [], 0, time.perf_counter()
    usual = 0.1
    for number in range(count):
        out = place / f"out-{number % 2}"
        if number % 4 == 3:
            killed += _killed(lambda out=out: write(recipe, out=out, force=True), draw.random() * usual)  # type: ignore[misc]
        else:
            begun = time.perf_counter()
            write(recipe, out=out, force=True)
            usual = 0.9 * usual + 0.1 * (time.perf_counter() - begun)
            gc.collect()
            resident.append(_resident())
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
        wrong += [f"merge {number}: {each}" for each in (verify(out) if out.exists() else [])]
        if number % 100 == 99:
            say(f"{number + 1} merges, {killed} killed, {resident[-1] / 2**20:.1f} MiB, {descriptors[-1]} descriptors")
    for number in range(2):
        write(recipe, out=place / f"out-{number}", force=True)
    left = sorted(path.name for path in place.iterdir() if path.name not in ("out-0", "out-1"))
    return Soaked(count, killed, time.perf_counter() - started, resident, descriptors, left, wrong)


_RUN = """\
base: {models}/base
experts: {{two: {models}/two, three: {models}/three}}
evaluate: {{data: {{two: {models}/two.csv, three: {models}/three.csv}}, protocols: [current, knn], device: cpu}}
report: false
"""
# One recipe for a run, one for a sweep.
RECIPES = {
    "run": _RUN + "diagnose: false\nmethod: ties\nalign: {{data: {{two: {models}/two.csv}}, aligner: ridge}}\n",
    "sweep": _RUN + "sweep: {{methods: [average, ties], scales: [0.5], aligners: [none, ridge], keep: true}}\n",
}


def soak_runs(folder: Path, kills: int, *, seed: int = 0) -> tuple[int, list[str]]:
    """A run and a sweep, each killed at `kills` random moments: how often a child was killed, and what is wrong.

    After each kill the same command goes on. Whatever was finished before must stay as it is, and in the end the
    results must be those of a run that nobody killed.
    """
    from tests.faults.tiny import write_experts

    from orthomerge.runs.run import run

    os.environ["ORTHOMERGE_CACHE"] = str(folder / "cache")
    models, draw, killed, wrong = write_experts(folder / "models"), random.Random(seed), 0, list[str]()
    for kind, text in RECIPES.items():
        recipe, place = folder / f"{kind}.yaml", folder / kind
        recipe.write_text(text.format(models=models))
        run(recipe, out=folder / f"{kind}-warm")  # what is imported late takes longest
        begun = time.perf_counter()
        run(recipe, out=folder / f"{kind}-alone", force=True)
        usual, whole = time.perf_counter() - begun, _results(folder / f"{kind}-alone")
        left = kills
        while left:
            moments = [draw.random() * usual for _ in range(min(left, 3))]  # in one run, which gets shorter each time
            for moment in moments:
                before = _finished(place)
                killed += _killed(lambda: run(recipe, out=place), moment)  # noqa: B023
                wrong += [f"{kind}: {name} was computed again" for name in before - _finished(place)]
                left -= 1
            before = _finished(place)
            run(recipe, out=place)
            wrong += [f"{kind}: {name} was computed again" for name in before - _finished(place)]
            results = _results(place)
            wrong += [
                f"{kind}: {name} differs" for name in whole.keys() | results if whole.get(name) != results.get(name)
            ]
            shutil.rmtree(place)
    return killed, wrong


def _finished(run: Path) -> set[tuple[str, int, int]]:
    """The results in a store, each with the time and the place on disk of its last file."""
    entries = [(path.parent.name, path.stat()) for path in run.glob(".store/*/entry.json")]
    return {(key, status.st_mtime_ns, status.st_ino) for key, status in entries}


def _results(run: Path) -> dict[str, bytes]:
    """Weights and scores of a run."""
    paths = [path for kind in ("*.safetensors", "records.jsonl") for path in run.rglob(kind)]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths if ".store" not in path.parts}


def _killed(work: Callable[[], object], after: float) -> int:
    """Do it in a child and kill that; 1 if it was killed, 0 if it was faster."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return int(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Job:
    """One of many at once: a merge, or the evaluation of a merge."""

    number: int
    models: Path
    merged: Path
    place: Path


def work(job: Job) -> str:
    """Do it; what is wrong, or nothing."""
    import torch
    from tests.faults.tiny import TASKS

    from orthomerge.api.evaluate import evaluate
    from orthomerge.evaluation.scores import read_run
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.saved import verify_folder
    from orthomerge.runs.models import write
    from orthomerge.runs.recipe import Recipe

    torch.set_num_threads(1)
    out = job.place / str(job.number)
    if job.number % 2:
        recipe = Recipe(
            {task: str(job.models / task) for task in TASKS}, base=str(job.models / "base"), method="dare", seed=7
        )
        return "; ".join(verify_folder(write(recipe, out=out)))
    data = {task: job.models / f"{task}.csv" for task in TASKS}
    evaluate(job.merged, data, encoding=Encoding(device="cpu", batch=16)).write(out)
    found = {(record.task, record.protocol) for record in read_run(out).records}
    wanted = {(task, protocol) for task in TASKS for protocol in ("current", "joint")}  # both: there are several
    return "" if found == wanted else f"records of {sorted(found)}"


def load(folder: Path, jobs: int, *, processes: int) -> tuple[list[str], set[bytes], set[bytes], float]:
    """`jobs` at once, half merges and half evaluations: what is wrong, weights and records that differ, seconds."""
    from tests.faults.tiny import TASKS, write_experts

    from orthomerge.runs.models import write
    from orthomerge.runs.recipe import Recipe

    os.environ["ORTHOMERGE_CACHE"] = str(folder / "cache")  # one for all of them
    models = write_experts(folder / "models")
    recipe = Recipe({task: str(models / task) for task in TASKS}, base=str(models / "base"), method="average")
    merged = write(recipe, out=folder / "merged")
    requested = [Job(number, models, merged, folder / "place") for number in range(jobs)]
    started = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        wrong = [
            f"job {job.number}: {told}" for job, told in zip(requested, pool.map(work, requested), strict=True) if told
        ]
    seconds = time.perf_counter() - started
    outs = [folder / "place" / str(number) for number in range(jobs)]
    weights = {(out / "encoder.safetensors").read_bytes() for out in outs[1::2]}
    records = {(out / "records.jsonl").read_bytes() for out in outs[::2]}
    hidden = [path for path in folder.rglob(".*") if path.name.endswith((".partial", ".lock", ".old"))]
    return wrong + [f"{path} was left" for path in hidden], weights, records, seconds


def main() -> None:
    """Soak, then load, then write benchmarks/results/soak.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--merges", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10, help="of a run and of a sweep, each")
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--processes", type=int, default=64, help="at once")
    arguments = parser.parse_args()
    about = describe_run()
    with tempfile.TemporaryDirectory() as place:
        (folder := Path(place, "soak")).mkdir()
        found = soak(folder, arguments.merges)
        shutil.rmtree(folder)
        (folder := Path(place, "runs")).mkdir()
        stopped, broken = soak_runs(folder, arguments.kills)
        (folder := Path(place, "load")).mkdir()
        wrong, weights, records, seconds = load(folder, arguments.jobs, processes=arguments.processes)
    half = found.resident[len(found.resident) // 2] / 2**20
    rows = [
        ["merges in a row, of them killed", f"{found.merges}, {found.killed}", ""],
        ["outputs that do not verify", str(len(found.wrong)), "0"],
        ["files left beside the outputs", str(len(found.left)), "0"],
        ["descriptors, first and last", f"{found.descriptors[0]}, {found.descriptors[-1]}", "the same"],
        ["memory, at half and at the end", f"{half:.1f}, {found.resident[-1] / 2**20:.1f} MiB", ""],
        ["growth a merge over the second half", f"{found.growth / 1024:.2f} kB", "below 4 kB"],
        ["seconds", f"{found.seconds:.0f}", ""],
        ["kills of a run and a sweep that hit", f"{stopped} of {2 * arguments.kills}", ""],
        ["results computed twice, or other than of a whole run", str(len(broken)), "0"],
        ["jobs side by side, half of them merges", f"{arguments.jobs} in {arguments.processes} processes", ""],
        ["of them wrong", str(len(wrong)), "0"],
        ["different weights among the merges", str(len(weights)), "1"],
        ["different records among the evaluations", str(len(records)), "1"],
        ["seconds", f"{seconds:.0f}", ""],
    ]  # fmt: skip
    sections = {"# Soak and load": about + "\n" + _TEXT.rstrip(), "## Found": table(["what", "found", "wanted"], rows)}
    print(write_result("soak", sections), *found.wrong[:5], *broken[:5], *wrong[:5], sep="\n")
    steady = found.descriptors[0] == found.descriptors[-1] and found.growth < 4096
    if found.wrong or found.left or broken or wrong or len(weights) != 1 or len(records) != 1 or not steady:
        raise SystemExit("not all is well: see the table")


if __name__ == "__main__":
    main()
