"""What a fit costs before its first step, beside another commit: tiny models, so that only the plumbing counts.

    python benchmarks/first_step.py --against COMMIT [--runs N]

Each run is a process of its own that carries out `merge RECIPE` with inputs to fit to and stops where the training loop
begins. `work` counts from after torch and transformers have been imported and have built a model once, `process` from
the start of the process. Exit code 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run, offline, source_of, table, write_result
from tools.walk import TASKS, make_world

BAR = 1 / 3
NOTES = """\
CPU seconds (user and system, one thread) until the first step of a fit of two experts, by the sources of two commits in
turn, median of the runs; BERT of two layers and width 64, 60 inputs per task. *work*: without what torch and
transformers need to be imported and to build their first model. *process*: from the start of the process. The bar is
for the ratio of *work*: importing the libraries alone takes most of *process*."""

_CHILD = """\
import os, runpy, sys, time
import torch
from transformers import BertModel, BertTokenizer
BertTokenizer.from_pretrained(sys.argv[1])
BertModel.from_pretrained(sys.argv[1])
import orthomerge.fitting.loop as loop

def first_step(*args, **kwargs):
    print(time.process_time() - started, time.process_time())
    sys.stdout.flush()
    os._exit(0)

loop.Loop.run = first_step
sys.argv = ["orthomerge", *sys.argv[2:]]
started = time.process_time()
runpy.run_module("orthomerge", run_name="__main__")
"""


def write_recipe(world: Path) -> Path:
    """A fit of the two experts, in words that every commit since 719347c reads."""
    recipe = world / "fit.yaml"
    document = {
        "base": "base",
        "experts": {task: task for task in TASKS},
        "method": "realign",
        "parameters": {"steps": 4, "look": 2, "batch": 4, "copies": 0},
        "fit": {"data": {task: f"{task}.csv" for task in TASKS}, "device": "cpu"},
    }
    recipe.write_text(yaml.safe_dump(document))
    return recipe


def measured(source: Path, world: Path, recipe: Path) -> tuple[float, float]:
    """Seconds of `work` and of `process` in one run."""
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        words = [sys.executable, "-c", _CHILD, str(world / "base")]
        words += ["merge", str(recipe), "--out", str(Path(folder) / "out"), "-q"]
        environment = {**offline(source), "OMP_NUM_THREADS": "1"}
        child = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    if child.returncode:
        raise SystemExit(f"{source}: the fit did not reach its first step:\n{child.stderr[-2000:]}")
    work, process = child.stdout.split()
    return float(work), float(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    described = describe_run()
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        world = Path(folder) / "world"
        world.mkdir()
        make_world(world)
        recipe = write_recipe(world)
        with source_of(arguments.against, Path(folder) / "against") as theirs:
            sources = {arguments.against: theirs, "here": ROOT / "src"}
            seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
            for _ in range(arguments.runs):
                for name, source in sources.items():
                    seconds[name].append(measured(source, world, recipe))
    medians = [[median(run[column] for run in runs) for runs in seconds.values()] for column in (0, 1)]
    rows = [
        [name, *(f"{value:.2f}" for value in values), f"{values[1] / values[0]:.2f}"]
        for name, values in zip(("work", "process"), medians, strict=True)
    ]
    within = medians[0][1] <= BAR * medians[0][0]
    shown = (
        table(["CPU s", *sources, "ratio"], rows) + f"\n\nBar of *work*: {BAR:.2f}, {'met' if within else 'MISSED'}."
    )
    print(shown)
    print(write_result("first-step", {"# A fit until its first step": NOTES, "## Run": described, "## Result": shown}))
    sys.exit(os.EX_OK if within else 1)


if __name__ == "__main__":
    main()
