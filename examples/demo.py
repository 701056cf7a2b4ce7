"""The whole story on seven small tasks: experts, what merging loses, and what aligned heads and fits win back.

python examples/demo.py [FOLDER]        (default: runs/demo; experts are kept there for the next run)
"""

from __future__ import annotations

import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from orthomerge.analysis.diagnosis import FILE as DIAGNOSIS
from orthomerge.analysis.diagnosis import write_diagnosis
from orthomerge.cli.commands import print_tables
from orthomerge.diagnosing import Looks, diagnose
from orthomerge.evaluation.evaluate import Bench, Question
from orthomerge.evaluation.running import run_evaluation
from orthomerge.evaluation.tables import accuracy_tables, lines
from orthomerge.features.cache import FeatureCache
from orthomerge.report.report import report
from orthomerge.runinfo import FILE as RUN
from orthomerge.runinfo import RunInfo, write_info
from orthomerge.suites.fits import Fitting, fit_all
from orthomerge.suites.table import build_suite

MERGES: dict[str, dict[str, Any]] = {"average": {}, "task_arithmetic": {"scale": 0.3}, "ties": {}}
STEPS = {"realign": 200, "moma": 150}  # fewer than by default: minutes are soon over
FITS = [  # the longest first
    *(
        Fitting(method, {"steps": steps, "start": start, "options": options}, f"{method} from {start}")
        for method, steps in STEPS.items()
        for start, options in MERGES.items()
    ),
    Fitting("adamerging", {"steps": 60}, "adamerging by layer"),
    Fitting("adamerging", {"steps": 60, "by": "task"}, "adamerging by task"),
    Fitting("concrete_am", {"steps": 30, "adapt_steps": 30}),
    Fitting("concrete_ta", {"steps": 60}),
    Fitting("fisher", {"inputs": 16}),
    Fitting("regmean"),
]


def main() -> None:
    torch.set_num_threads(1)  # the models are so small that a second thread only gets in the way
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    begun, started = datetime.now(UTC), time.monotonic()
    seconds: dict[str, float] = {}

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    def done(stage: str) -> None:
        seconds[stage] = round(time.monotonic() - started - sum(seconds.values()), 1)

    say("building the suite 'digits': a tiny ViT and an expert for each of seven tasks (minutes, the first time)")
    suite = build_suite("digits", folder=folder / "suite", say=say)
    references = suite.references()
    bench = Bench(
        suite.tasks,
        suite.processor,
        teachers=references["expert"].models,
        cache=FeatureCache(folder / "suite" / "features"),
        device="cpu",
    )
    done("build")
    say("merging the seven encoders into one, three ways; every task keeps its own head")
    merged = [suite.merged(method, options) for method, options in MERGES.items()]
    say("fitting merges to unlabelled training inputs: MOMA, its rivals and realign, with few steps")
    merged += fit_all(suite, FITS, device="cpu", say=say)
    done("merge and fit")
    say("scoring: experts, merges as they are, and merges whose heads were aligned without a single label")
    questions = [
        Question("current"),
        Question("knn", shots=5, seeds=5, access="inductive", subjects=tuple(MERGES)),
        Question("aligned-c", access="inductive", subjects=("base", *MERGES)),
        Question("current", aligner="auto", access="inductive", subjects=("base", *MERGES)),
        Question("current", aligner="surgery", access="inductive", subjects=tuple(MERGES)),
        Question("current", aligner="probsurgery", access="inductive", subjects=tuple(MERGES)),
    ]
    subjects = [*references.values(), *merged]
    records = run_evaluation(bench, subjects, questions, out=folder, suite="digits")
    print_tables(accuracy_tables(records))
    done("evaluate")
    means = {(line.method, line.title): line.mean for line in lines(records)}
    expert, plain = means["expert", "current"], means["task_arithmetic", "current"]
    paper, ours = means["task_arithmetic", "aligned-c"], means["task_arithmetic", "aligner auto"]
    moma, realign = (means[f"{method} from task_arithmetic", "current"] for method in ("moma", "realign"))
    print(
        f"\nSeven experts reach {expert:.1f}. One merged encoder (task arithmetic) under their heads: {plain:.1f}.\n"
        "The same encoder with its heads aligned to the experts' outputs on unlabelled training inputs: "
        f"{paper:.1f} with aligned-c, {ours:.1f} with the aligner 'auto'.\n"
        "Fitted to the same inputs, encoder and heads: "
        f"{moma:.1f} with MOMA, {realign:.1f} with 'realign'. Not one parameter was added."
    )
    say("looking into the merge by task arithmetic: what was lost, and what was only out of line")
    origin = next(iter(references["base"].models.values()))
    looks = Looks(points=250, layers=256)
    chosen = next(subject for subject in merged if subject.name == "task_arithmetic")
    write_diagnosis(folder / DIAGNOSIS, diagnose(bench, chosen, base=origin, records=records, looks=looks))
    done("diagnose")
    outputs = tuple(str(next(iter(subject.models.values())).relative_to(folder)) for subject in merged)
    start = begun.isoformat(timespec="seconds")
    info = RunInfo(command="make demo", started=start, seconds=seconds, machine=platform.platform(), manifests=outputs)
    write_info(folder / RUN, info)
    page = report(folder, folder / "report.html").page
    say(f"records, predictions and tables are in {folder}; open {page} in a browser")
    print(
        "\nTry next:\n"
        f"  orthomerge evaluate --suite digits --folder {folder / 'suite'} --method tsv_m --aligner auto --shots 5\n"
        "  orthomerge methods; orthomerge aligners\n"
        "  orthomerge merge --base BASE --expert NAME=PATH ... --method ties --out OUT    (your own checkpoints)"
    )


if __name__ == "__main__":
    main()
