"""Experts, merges and protocols of one suite, in one table: what `text8.py` and `vision8.py` run."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.environments import describe_run  # noqa: E402

from orthomerge.evaluation.evaluate import Bench, Question  # noqa: E402
from orthomerge.evaluation.running import run_evaluation  # noqa: E402
from orthomerge.evaluation.scale import ScaleSearch, search_scale  # noqa: E402
from orthomerge.evaluation.tables import markdown  # noqa: E402
from orthomerge.features.cache import FeatureCache  # noqa: E402
from orthomerge.suites.table import build_suite  # noqa: E402

GRIDS = {
    "task_arithmetic": [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5],
    "ties": [0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0],
    "ties_sum": [0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5],
}


def questions(seeds: int) -> list[Question]:
    """The papers' protocols, inductive first and their own transductive one apart; the base is the control."""
    merges = ("average", *GRIDS)
    return [
        Question("current"),
        Question("knn", shots=5, seeds=seeds, access="inductive", subjects=merges),
        Question("aligned-c", shots=5, seeds=seeds, access="inductive", subjects=merges),
        Question("aligned-c", shots=20, seeds=seeds, access="inductive", subjects=merges),
        Question("aligned-c", access="inductive", subjects=("base", *merges)),
        Question("probe", access="inductive", subjects=("base", *merges)),
        Question("aligned-c", access="cross-fitted", subjects=merges),
        Question("aligned-c", access="transductive", subjects=merges),
    ]


def main(name: str) -> None:
    parser = argparse.ArgumentParser(description=f"the {name} suite: experts, merges, protocols")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / name)
    parser.add_argument("--base", help="folder or hub id of the base (text8)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    suite = build_suite(name, folder=given.folder, data=given.data, base=given.base, device=given.device, say=say)
    references = suite.references()
    bench = Bench(
        suite.tasks,
        suite.processor,
        teachers=references["expert"].models,
        cache=FeatureCache(given.folder / "features"),
        device=given.device,
        batch=256,
    )
    say("references are ready")
    searches: dict[str, ScaleSearch] = {}
    for method, grid in GRIDS.items():
        searches[method] = search_scale(suite.recipe(method), bench, grid=grid)
        say(f"{method}: scale {searches[method].best:g} chosen on validation data")
        print(searches[method].plot(), flush=True)
    subjects = [
        *references.values(),
        suite.merged("average"),
        *(suite.merged(method, {"scale": search.best}) for method, search in searches.items()),
    ]
    records = run_evaluation(bench, subjects, questions(given.seeds), out=given.folder / "run", suite=name, say=say)
    table = markdown(records)
    print(table)
    scales = ", ".join(f"{method} {search.best:g}" for method, search in searches.items())
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / f"{name}.md").write_text(
        f"# {name}\n\nAccuracy in percent. Scales chosen by normalised accuracy on validation data: {scales}. "
        "knn and aligned-c with few inputs: drawn from the training split, mean over seeds ± deviation of the mean.\n\n"
        f"{describe_run()}\n\n## Result\n\n{table}\n"
    )
    say("done")
