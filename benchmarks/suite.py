"""Experts, merges, protocols and aligners of one suite.

python benchmarks/suite.py digits                              half an hour on a CPU
python benchmarks/suite.py text8 --data ../shared/data         minutes on a GPU, hours on a CPU
python benchmarks/suite.py vision8 --only aligners --aligners orthogonal ridge
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.aligner_table import aligner_protocols, aligner_sheets  # noqa: E402
from benchmarks.environments import describe_run  # noqa: E402

from orthomerge.alignment.aligners import ALIGNERS  # noqa: E402
from orthomerge.api.evaluate import evaluate  # noqa: E402
from orthomerge.core.device import device_of  # noqa: E402
from orthomerge.data.task import Split  # noqa: E402
from orthomerge.evaluation.evaluate import Subject  # noqa: E402
from orthomerge.evaluation.protocols import EvaluationProtocol  # noqa: E402
from orthomerge.evaluation.records import Record  # noqa: E402
from orthomerge.evaluation.scale import search_scale  # noqa: E402
from orthomerge.evaluation.scores import read_run  # noqa: E402
from orthomerge.suites.table import build_suite  # noqa: E402

GRIDS = {
    "task_arithmetic": [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5],
    "ties": [0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0],
}


def protocols(seeds: int, support: Split = "train") -> list[EvaluationProtocol]:
    """The papers' protocols, inductive first and their own transductive one apart; the base is the control."""
    merges = ("average", *GRIDS)
    chosen = [
        EvaluationProtocol("current"),
        EvaluationProtocol("knn", shots=5, seeds=seeds, models=merges),
        EvaluationProtocol("aligned-c", shots=5, seeds=seeds, models=merges),
        EvaluationProtocol("aligned-c", shots=20, seeds=seeds, models=merges),
        EvaluationProtocol("aligned-c", models=("base", *merges)),
        EvaluationProtocol("probe", models=("base", *merges)),
        EvaluationProtocol("aligned-c", access="transductive", models=merges),
    ]
    return [replace(protocol, support=support, fewer=True) for protocol in chosen]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["digits", "text8", "vision8"])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path, help="of the suite and its runs (runs/SUITE)")
    parser.add_argument("--base", help="folder or hub id of the base (text8)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=5, help="draws of few inputs for the protocols (5)")
    parser.add_argument("--draws", type=int, default=20, help="draws of few inputs for aligners (20)")
    parser.add_argument("--scale", action="append", default=[], metavar="METHOD=SCALE", help="instead of a search")
    parser.add_argument(
        "--support", choices=["train", "val"], default="train", help="split of inductive inputs (train)"
    )
    parser.add_argument("--only", choices=["protocols", "aligners"], help="one of the two tables")
    parser.add_argument("--aligners", nargs="+", choices=list(ALIGNERS), default=list(ALIGNERS), help="only these")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    name, folder = arguments.suite, arguments.folder or ROOT / "runs" / arguments.suite
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    suite = build_suite(name, folder=folder, data=arguments.data, base=arguments.base, device=arguments.device, say=say)
    encoding = suite.encoding(arguments.device, batch=256)
    best = {method: float(scale) for method, scale in (text.split("=") for text in arguments.scale)}
    for method, grid in GRIDS.items():
        if method not in best:
            search = search_scale(suite.experts, method, suite.tasks, grid=grid, encoding=encoding)
            best[method] = search.best
            say(f"{method}: scale {search.best:g} chosen on validation data, where the means are {search.means}")
    merges: dict[str, dict[str, float]] = {"average": {}, **{method: {"scale": best[method]} for method in GRIDS}}
    subjects = list(suite.references().values())
    for method, options in merges.items():
        subjects.append(Subject(method, dict.fromkeys(suite.tasks, suite.merged(method, options)), options))
    scales = ", ".join(f"{method} {best[method]:g}" for method in GRIDS)
    about = (
        f"Scales {'given' if arguments.scale else 'chosen by normalised accuracy on validation data'}: {scales}. "
        f"Inductive inputs: from {arguments.support}"
    )
    common: dict[str, Any] = {"experts": suite.experts, "suite": name, "encoding": encoding}
    if arguments.only != "aligners":
        requested = protocols(arguments.seeds, arguments.support)
        evaluate(subjects, suite.tasks, protocols=requested, against="task_arithmetic", **common).write(folder / "run")
        text = f"{about}; a class that has fewer gives all. sd and worst: over draws of few inputs."
        write(arguments.results, name, name, text, read_run(folder / "run").markdown())
        say("protocols are done")
    if arguments.only != "protocols":
        scored = [subject for subject in subjects if subject.name not in ("expert", "mtl")]
        records: list[Record] = []
        for aligner in arguments.aligners:  # one by one, so that a run that was cut continues with the next
            device = device_of(arguments.device).type
            requested = aligner_protocols(arguments.draws, support=arguments.support, aligners=[aligner], device=device)
            out = folder / "aligners" / f"{aligner}-{digest_of(requested, best)}"
            if not (out / "notes.json").exists():
                evaluate(scored, suite.tasks, protocols=requested, **common).write(out)
            records += read_run(out).records
        tables = "\n\n".join(sheet.markdown() for sheet in aligner_sheets(records))
        text = f"{about}. Mean accuracy of all tasks; ± its deviation over draws, and their number."
        write(arguments.results, f"aligners-{name}", f"Aligners on {name}", text, tables)
        say("aligners are done")


def digest_of(requested: Sequence[EvaluationProtocol], scales: Mapping[str, float]) -> str:
    """Differs if anything else is requested."""
    return hashlib.sha256(repr((requested, sorted(scales.items()))).encode()).hexdigest()[:8]


def write(folder: Path, file: str, title: str, text: str, tables: str) -> None:
    """A result with how it was made."""
    print(tables, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{file}.md").write_text(
        f"# {title}\n\nAccuracy in percent. {text}\n\n{describe_run()}\n\n## Result\n\n{tables}\n"
    )


if __name__ == "__main__":
    main()
