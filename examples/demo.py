"""The whole story on seven small tasks: experts, what merging loses, and what aligned heads and fits win back.

python examples/demo.py [FOLDER]        (default: runs/demo; experts are kept there for the next run)
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from orthomerge.cli.scoring import print_records
from orthomerge.evaluation.evaluate import Bench, Question
from orthomerge.evaluation.running import run_evaluation
from orthomerge.evaluation.tables import lines
from orthomerge.features.cache import FeatureCache
from orthomerge.suites.table import build_suite

MERGES = {"average": {}, "task_arithmetic": {"scale": 0.3}, "ties": {}}
START: dict[str, Any] = {"options": MERGES["task_arithmetic"]}
FITS: dict[str, dict[str, Any]] = {  # fewer steps than by default: two minutes are soon over
    "fisher": {"inputs": 16},
    "regmean": {},
    "adamerging": {"steps": 100},
    "concrete_ta": {"steps": 100},
    "moma": {"steps": 200, **START},
    "realign": {"steps": 200, **START},
}


def main() -> None:
    torch.set_num_threads(1)  # the models are so small that a second thread only gets in the way
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    say("building the suite 'digits': a tiny ViT and an expert for each of seven tasks (minutes, the first time)")
    suite = build_suite("digits", folder=folder / "suite", say=say, workers=min(os.cpu_count() or 1, 4))
    references = suite.references()
    bench = Bench(
        suite.tasks,
        suite.processor,
        teachers=references["expert"].models,
        cache=FeatureCache(folder / "suite" / "features"),
        device="cpu",
    )
    say("merging the seven encoders into one, three ways; every task keeps its own head")
    merged = [suite.merged(method, options) for method, options in MERGES.items()]
    say(f"fitting merges to unlabelled training inputs: {', '.join(FITS)}")
    merged += [suite.fitted(method, options, device="cpu") for method, options in FITS.items()]
    say("scoring: experts, merges as they are, and merges whose heads were aligned without a single label")
    questions = [
        Question("current"),
        Question("knn", shots=5, seeds=5, access="inductive", subjects=tuple(MERGES)),
        Question("aligned-c", access="inductive", subjects=("base", *MERGES)),
        Question("current", aligner="auto", access="inductive", subjects=("base", *MERGES)),
    ]
    records = run_evaluation(bench, [*references.values(), *merged], questions, out=folder, suite="digits")
    print_records(records)
    means = {(line.method, line.title): line.mean for line in lines(records)}
    expert, plain = means["expert", "current"], means["task_arithmetic", "current"]
    paper, ours = means["task_arithmetic", "aligned-c"], means["task_arithmetic", "aligner auto"]
    moma, realign = means["moma", "current"], means["realign", "current"]
    print(
        f"\nSeven experts reach {expert:.1f}. One merged encoder (task arithmetic) under their heads: {plain:.1f}.\n"
        "The same encoder with its heads aligned to the experts' outputs on unlabelled training inputs: "
        f"{paper:.1f} with aligned-c, {ours:.1f} with the aligner 'auto'.\n"
        "Fitted to the same inputs, encoder and heads: "
        f"{moma:.1f} with MOMA, {realign:.1f} with 'realign'. Not one parameter was added."
    )
    say(f"records, predictions and tables are in {folder}")
    print(
        "\nTry next:\n"
        f"  orthomerge evaluate --suite digits --folder {folder / 'suite'} --method tsv_m --aligner auto --shots 5\n"
        "  orthomerge methods; orthomerge aligners\n"
        "  orthomerge merge --base BASE --expert NAME=PATH ... --method ties --out OUT    (your own checkpoints)"
    )


if __name__ == "__main__":
    main()
