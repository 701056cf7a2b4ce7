"""Experts, merges, protocols and aligners of one suite: what `text8.py`, `vision8.py` and `digits.py` run."""

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


def main(name: str) -> None:
    parser = argparse.ArgumentParser(description=f"the {name} suite: experts, merges, protocols")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / name)
    parser.add_argument("--base", help="folder or hub id of the base (text8)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=5, help="draws of few inputs for the protocols (5)")
    parser.add_argument("--draws", type=int, default=20, help="draws of few inputs for aligners (20)")
    parser.add_argument("--scale", action="append", default=[], metavar="METHOD=SCALE", help="instead of a search")
    parser.add_argument(
        "--support", choices=["train", "val"], default="train", help="where inductive inputs come from (train)"
    )
    parser.add_argument("--only", choices=["protocols", "aligners"], help="one of the two tables")
    parser.add_argument("--aligners", nargs="+", choices=list(ALIGNERS), default=list(ALIGNERS), help="only these")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    suite = build_suite(
        name,
        folder=given.folder,
        data=given.data,
        base=given.base,
        device=given.device,
        say=say,
    )
    references = suite.references()
    encoding = suite.encoding(given.device, batch=256)
    say("references are ready")
    best = {method: float(scale) for method, scale in (text.split("=") for text in given.scale)}
    for method, grid in GRIDS.items():
        if method not in best:
            search = search_scale(suite.experts(), method, suite.tasks, grid=grid, encoding=encoding)
            best[method] = search.best
            say(f"{method}: scale {search.best:g} chosen on validation data")
            print(search.plot(), flush=True)
    merges: dict[str, dict[str, float]] = {"average": {}, **{method: {"scale": best[method]} for method in GRIDS}}
    subjects = [
        *references.values(),
        *(
            Subject(method, dict.fromkeys(suite.tasks, suite.merged(method, options)), options)
            for method, options in merges.items()
        ),
    ]
    scales = ", ".join(f"{method} {best[method]:g}" for method in GRIDS)
    chosen = f"Scales {'given' if given.scale else 'chosen by normalised accuracy on validation data'}: {scales}."
    common: dict[str, Any] = {"experts": suite.experts(), "suite": name, "encoding": encoding}
    if given.only != "aligners":
        out = given.folder / "run"
        asked = protocols(given.seeds, given.support)
        evaluate(subjects, suite.tasks, protocols=asked, against="task_arithmetic", **common).write(out)
        text = (
            f"{chosen} Inductive inputs: from {given.support}; a class that has fewer than asked for gives all. "
            "sd and worst: over draws of few inputs."
        )
        write(given.results, name, name, text, read_run(out).markdown())
        say("protocols are done")
    if given.only != "protocols":
        wanted = [subject for subject in subjects if subject.name not in ("expert", "mtl")]
        records: list[Record] = []
        for aligner in given.aligners:  # one by one: a run that was cut goes on with the next
            device = device_of(given.device).type
            asked = aligner_protocols(given.draws, support=given.support, aligners=[aligner], device=device)
            out = given.folder / "aligners" / f"{aligner}-{digest_of(asked, best)}"
            if not (out / "notes.json").exists():
                evaluate(wanted, suite.tasks, protocols=asked, **common).write(out)
            records += read_run(out).records
        tables = "\n\n".join(sheet.markdown() for sheet in aligner_sheets(records))
        text = (
            f"{chosen} Inductive inputs: from {given.support}. Mean accuracy of all tasks; ± its deviation over draws, "
            "and their number."
        )
        write(given.results, f"aligners-{name}", f"Aligners on {name}", text, tables)
        say("aligners are done")


def digest_of(asked: Sequence[EvaluationProtocol], scales: Mapping[str, float]) -> str:
    """Differs if anything else is asked."""
    return hashlib.sha256(repr((asked, sorted(scales.items()))).encode()).hexdigest()[:8]


def write(folder: Path, file: str, title: str, text: str, tables: str) -> None:
    """A result with how it was made."""
    print(tables, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{file}.md").write_text(
        f"# {title}\n\nAccuracy in percent. {text}\n\n{describe_run()}\n\n## Result\n\n{tables}\n"
    )
