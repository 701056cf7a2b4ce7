"""Runs made by hand for tests and benchmarks of reports."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orthomerge.analysis.diagnosis import (
    Bars,
    Curve,
    Diagnosis,
    Finding,
    Heat,
    Lines,
    Points,
    Series,
    View,
    write_diagnosis,
)
from orthomerge.data.task import Access
from orthomerge.evaluation.comparisons import Comparison, TaskDifference
from orthomerge.evaluation.metrics import Difference, Equivalence
from orthomerge.evaluation.records import Record, RunInfo, write_info, write_records

ALERT = "<script>alert(1)</script>"
BREAK_OUT = '"><img src=x onerror="document.title=\'broken\'">'
DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Er"
    "kJggg=="
)


def record(
    task: str, method: str, value: float, *, protocol: str = "current", access: Access = "data-free", **more: object
) -> Record:
    given: dict[str, Any] = {"suite": "toy", "versions": {"orthomerge": "0.1.0"}, **more}
    return Record(task, method, protocol, "accuracy", value, value - 0.02, value + 0.02, 100, access, **given)


def comparison(
    one: Record, other: Record, *, verdict: str, tasks: Sequence[str], worse: Sequence[str] = ()
) -> Comparison:
    """`one` against `other`, with numbers that say no more than the verdict does."""
    gap = one.value - other.value
    difference, equivalence = Difference(gap, gap - 0.01, gap + 0.01, 0.005, 0.001), Equivalence(0.01, 0.05, 1.0, 0.0)
    by_task = {task: TaskDifference(gap, gap - 0.02, gap + 0.02, 0.001, 0.004, 100) for task in tasks}
    return Comparison(
        one.method, other.method, one.way, 1, difference, 0.002, equivalence, "comparable" in verdict, by_task,
        better=(), worse=tuple(worse), verdict=verdict,
    )  # fmt: skip


def small_run(tasks: Sequence[str] = ("a", "b"), *, method: str = "ties") -> list[Record]:
    """Experts 90, merged 60, aligned 84, and a classifier with parameters of its own at 86, transductively."""
    records = []
    for number, task in enumerate(tasks):
        shift = 0.02 * (-1) ** number
        inductive: dict[str, Any] = {"access": "inductive", "aligner": "auto", "support": "train"}
        transductive: dict[str, Any] = {"access": "transductive", "aligner": "surgery", "support": "test"}
        records += [
            record(task, "expert", 0.90 + shift),
            record(task, method, 0.60 + shift),
            record(task, method, 0.84 + shift, **inductive),
            record(task, "average", 0.80 + shift, **inductive),
            record(task, method, 0.86 + shift, **transductive, extra_parameters=1234),
        ]
    return records


def write_run(
    folder: Path, records: Sequence[Record], *, comparisons: Sequence[Comparison] = (), notes: Sequence[str] = (),
    diagnosis: Diagnosis | None = None, info: RunInfo | None = None,
) -> Path:  # fmt: skip
    """A run folder with only the files that are not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    write_records(folder / "records.jsonl", records)
    for name, items in (("comparisons.json", [asdict(item) for item in comparisons]), ("notes.json", list(notes))):
        if items:
            (folder / name).write_text(json.dumps(items))
    if diagnosis:
        write_diagnosis(folder / "diagnosis.json", diagnosis)
    if info:
        write_info(folder / "run.json", info)
    return folder


def points(
    task: str, *, count: int = 30, classes: Sequence[str] = ("cat", "dog"), seed: int = 0, images: bool = False
) -> Points:
    """Three views; the expert is always right, the merge on every second input, aligned on all but one."""
    draw = random.Random(seed)
    true = tuple(number % len(classes) for number in range(count))
    views = []
    for place, name in enumerate(("expert", "merged", "aligned")):
        wrong = {1: set(range(0, count, 2)), 2: {0}}.get(place, set())
        predicted = tuple((kind + (number in wrong)) % len(classes) for number, kind in enumerate(true))
        x = tuple(10 * math.cos(6.3 * kind / len(classes)) + draw.gauss(0, 1 + place) for kind in true)
        y = tuple(10 * math.sin(6.3 * kind / len(classes)) + draw.gauss(0, 1 + place) for kind in true)
        right = 100 * sum(one == other for one, other in zip(predicted, true, strict=True)) / count
        views.append(View(name, f"{name} ({right:.1f} %)", x, y, predicted))
    texts = tuple(f"input {number} of {task}: a sentence that somebody wrote" for number in range(count))
    shown: Any = {"images": (DOT,) * count} if images else {"texts": texts}
    title = f"{task}: what the encoders see"
    return Points(f"points-{seed}", title, "t-SNE, seeded.", task, tuple(classes), true, tuple(views), **shown)


def figures(tasks: Sequence[str] = ("a", "b")) -> tuple[Lines, Heat, Heat, Bars]:
    """One of each kind but points, with a hole in each."""
    nan = math.nan
    return (
        Lines(
            "shots", "By shots", "With bands.", "inputs a class", "accuracy, %",
            (Curve("one", (1.0, 5.0, 20.0), (50.0, 60.0, nan), (45.0, 55.0, nan), (55.0, 65.0, nan)),
             Curve("two", (1.0, 5.0, 20.0), (40.0, 41.5, 42.25))), log_x=True,
        ),
        Heat("cka", "CKA", "Between experts.", tuple(tasks), ("x", "y", "z"), ((1.0, 0.5, nan),) * len(tasks), "CKA"),
        Heat("cosines", "Cosines", "Of task vectors.", ("r",), ("x", "y"), ((-0.25, 0.5),), "cosine", diverging=True),
        Bars(
            "families", "Families", "By task.", tuple(tasks), "accuracy, %",
            (Series("raw", tuple(50.0 for _ in tasks), tuple(45.0 for _ in tasks), tuple(55.0 for _ in tasks)),
             Series("linear", tuple(nan for _ in tasks))),
        ),
    )  # fmt: skip


MANIFEST = {
    "family": "bert",
    "encoder": {"content": "blake3:" + "cd" * 32},
    "method": {"name": "ties", "parameters": {"density": 0.2, "weights": None}},
    "inputs": {
        "base": {"name": "base", "files": [{"name": "m", "size": 1500, "hash": "blake3:" + "ab" * 32}]},
        "experts": {"a": {"name": "./a", "revision": "main", "files": [{"name": "m", "size": 2, "hash": "blake3:ff"}]}},
    },
    "heads": {"a": {"labels": ["no", "yes"]}},
    "alignment": {"aligner": "auto", "access": "inductive", "split": "train", "tasks": {"a": {"inputs": 50}}},
}


def full_run(folder: Path) -> Path:
    """A run folder that has every file a report reads."""
    records = small_run()
    by = {(item.method, item.access): item for item in records if item.task == "a"}
    diagnosis = Diagnosis(
        "ties", ("a", "b"), (Finding("Mostly misalignment", "Try `auto`.", {"won back": 24.0}),),
        (*figures(), points("a"), points("b", seed=1)), {"seed": 0, "t-SNE": {"perplexity": 30}},
    )  # fmt: skip
    info = RunInfo(
        "orthomerge run r.yaml", "method: ties\n", "2026-11-15T18:41:07+00:00", {"merge": 1.5, "evaluate": 125.0},
        812_000_000, "2 cores", {"torch": "2.13.0"}, (MANIFEST, "gone"),
    )  # fmt: skip
    compared = [comparison(by["ties", "data-free"], by["expert", "data-free"], verdict="worse", tasks=("a", "b"))]
    return write_run(folder, records, comparisons=compared, notes=["a doubt"], diagnosis=diagnosis, info=info)


def hostile_run(folder: Path) -> Path:
    """Every text that a run can hold tries to be markup."""
    figure = replace(points(BREAK_OUT, classes=(ALERT, BREAK_OUT)), title=ALERT, caption=BREAK_OUT)
    views = tuple(replace(view, name=name) for view, name in zip(figure.views, (ALERT, BREAK_OUT, "x"), strict=True))
    figure = replace(figure, texts=(BREAK_OUT + ALERT,) * len(figure.true), views=views)
    verdict = (Finding(ALERT, f"`{ALERT}` {BREAK_OUT}", {BREAK_OUT: 1.0}),)
    diagnosis = Diagnosis(ALERT, (ALERT,), verdict, (figure,), {ALERT: BREAK_OUT})
    block = json.loads(json.dumps(MANIFEST).replace("ties", "<b>").replace("./a", "<i>"))
    info = RunInfo(ALERT, BREAK_OUT, ALERT, {ALERT: 1.0}, 1, BREAK_OUT, {ALERT: BREAK_OUT}, (block, ALERT))
    records = small_run((ALERT, BREAK_OUT), method=BREAK_OUT)
    return write_run(folder, records, notes=[ALERT, BREAK_OUT], diagnosis=diagnosis, info=info)
