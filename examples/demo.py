"""The whole story on seven small tasks: experts, what merging loses, and what aligned heads and fits win back.

python examples/demo.py [FOLDER]        (default: runs/demo; experts are kept there for the next run)
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from orthomerge.analysis.detail import Detail
from orthomerge.analysis.diagnosis import FILE as DIAGNOSIS
from orthomerge.analysis.diagnosis import write_diagnosis
from orthomerge.api.diagnose import diagnose
from orthomerge.api.evaluate import evaluate
from orthomerge.cli.printing import show
from orthomerge.evaluation.evaluate import Subject
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import INFO as RUN
from orthomerge.evaluation.records import RunInfo, write_info
from orthomerge.evaluation.tables import accuracy_tables, lines
from orthomerge.fitting.fit import fit
from orthomerge.models.model import Model
from orthomerge.reporting.report import report
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import build_suite

MERGES: dict[str, dict[str, Any]] = {"average": {}, "task_arithmetic": {"scale": 0.3}, "ties": {}}
STEPS = {"realign": 200, "moma": 150}  # fewer than by default: minutes are soon over
FITS: list[tuple[str, str, dict[str, Any]]] = [  # the name in tables, the method, and its options
    *(
        (f"{method} from {start}", method, {"steps": steps, "start": start, "options": options})
        for method, steps in STEPS.items()
        for start, options in MERGES.items()
    ),
    ("adamerging by layer", "adamerging", {"steps": 60}),
    ("adamerging by task", "adamerging", {"steps": 60, "by": "task"}),
    ("concrete_am", "concrete_am", {"steps": 30, "adapt_steps": 30}),
    ("concrete_ta", "concrete_ta", {"steps": 60}),
    ("fisher", "fisher", {"inputs": 16}),
    ("regmean", "regmean", {}),
]
PROTOCOLS = [
    EvaluationProtocol("current"),
    EvaluationProtocol("knn", shots=5, seeds=5, models=tuple(MERGES)),
    EvaluationProtocol("aligned-c", models=("base", *MERGES)),
    EvaluationProtocol(aligner="auto", models=("base", *MERGES)),
    EvaluationProtocol(aligner="surgery", models=tuple(MERGES)),
    EvaluationProtocol(aligner="probsurgery", models=tuple(MERGES)),
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
    encoding = suite.encoding("cpu")
    done("build")
    say("merging the seven encoders into one, three ways; every task keeps its own head")
    models = {method: suite.merged(method, options) for method, options in MERGES.items()}
    say("fitting merges to unlabelled training inputs: MOMA, its rivals and realign, with few steps")
    models |= fit_all(suite, say)
    done("merge and fit")
    say("scoring: experts, merges as they are, and merges whose heads were aligned without a single label")
    merges = [replace(Subject.of(model, suite.tasks), name=name) for name, model in models.items()]
    subjects = [*suite.references().values(), *merges]
    scores = evaluate(
        subjects, suite.tasks, protocols=PROTOCOLS, experts=suite.experts, suite="digits", encoding=encoding
    )
    scores.write(folder)
    records = scores.records
    for table in accuracy_tables(records):
        show(table)
    done("evaluate")
    means = {(line.method, line.way.title): line.mean for line in lines(records)}
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
    diagnosis = diagnose(
        models["task_arithmetic"],
        suite.tasks,
        experts=suite.experts,
        detail=Detail(points=250, layers=256),
        records=records,
        encoding=encoding,
    )
    write_diagnosis(folder / DIAGNOSIS, diagnosis)
    done("diagnose")
    outputs = save(models, folder)
    start = begun.isoformat(timespec="seconds")
    info = RunInfo(command="make demo", started=start, seconds=seconds, machine=platform.platform(), manifests=outputs)
    write_info(folder / RUN, info)
    page = report(folder, folder / "report.html").page
    say(f"records, predictions and tables are in {folder}; open {page} in a browser")
    print(
        "\nTry next:\n"
        f"  orthomerge evaluate --suite digits --folder {folder / 'suite'} --method tsv_m --aligner auto --shots 5\n"
        "  orthomerge list methods; orthomerge list aligners\n"
        "  orthomerge merge EXPERT EXPERT --base BASE --method ties --out OUT    (your own checkpoints)"
    )


def fit_all(suite: Suite, say: Callable[[str], None]) -> dict[str, Model]:
    """Merges fitted to the suite's unlabelled training inputs, by name."""
    models = {}
    for name, method, options in FITS:
        say(f"  {name}")
        encoding = suite.encoding("cpu")
        models[name] = fit(suite.experts, method, suite.tasks, options, device="cpu", encoding=encoding)
    return models


def save(models: Mapping[str, Model], folder: Path) -> tuple[str, ...]:
    """Write all models; their places in the run folder."""
    places = {name: f"models/{name.replace(' ', '-')}" for name in models}
    for name, place in places.items():
        models[name].save(folder / place, force=True)
    return tuple(places.values())


if __name__ == "__main__":
    main()
