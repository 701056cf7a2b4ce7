"""Every method of a run against one of them, from the predictions that the run kept: no model is needed.

Methods are compared where they were read in the same way (protocol, options, shots, access, support), on the tasks,
seeds and inputs that both were scored on. One way of reading with its methods is a *family*, over which Holm's
correction runs. The reference is the method with the best mean unless another is named; since the best was chosen on
these very inputs, its lead is flattered a little.

A task is won or lost by exact McNemar. Over several seeds an input counts for the method that was right under more of
them, so that test is about these seeds; the interval of the mean is about other seeds too.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError, nearest
from orthomerge.core.schema import build
from orthomerge.core.table import Table
from orthomerge.evaluation.compare import Difference, Equivalence, bootstrap_by_task, holm, mcnemar_hits, tost
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.records import Record, Way, read_document, read_records

MARGIN = 0.01  # below one point either way two methods may be called comparable
_ALPHA = 0.05
_RECORDS = "records.jsonl"

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TaskDifference:
    """One task: the difference with its 95 % interval, McNemar's p-value and that value after Holm's correction."""

    estimate: float
    low: float
    high: float
    p: float
    adjusted: float
    examples: int


@dataclass(frozen=True)
class Comparison:
    """`method` minus `reference`, in shares. `adjusted`: the mean's p-value after Holm's correction.

    `better` and `worse`: tasks on which McNemar, so corrected, tells them apart. `comparable`: both one-sided tests
    reject a difference of the margin or more; only then does the `verdict` use that word.
    """

    method: str
    reference: str
    way: Way
    seeds: int
    difference: Difference
    adjusted: float
    equivalence: Equivalence
    comparable: bool
    tasks: dict[str, TaskDifference]
    better: tuple[str, ...]
    worse: tuple[str, ...]
    verdict: str


@dataclass(frozen=True)
class Predictions:
    """What was predicted for every test input [n], and the truth [n] in the same label space."""

    predicted: NDArray[np.int32]
    truth: NDArray[np.int32]

    @property
    def scored(self) -> Bools:
        """On which inputs the record was counted."""
        scored: Bools = self.predicted != UNSCORED
        return scored

    @property
    def hits(self) -> Bools:
        """Which inputs were right."""
        hits: Bools = (self.predicted == self.truth) & self.scored
        return hits


_Row = Mapping[str, Mapping[int, Record]]  # one method: task, seed
_Read = Callable[[Record], Predictions]


def compare_run(
    folder: Path, *, against: str | None = None, margin: float = MARGIN, resamples: int = 10_000, seed: int = 0
) -> list[Comparison]:
    """All comparisons of a run folder. `against`: the reference wherever it was scored; elsewhere it is the best."""
    records = read_records(folder / _RECORDS)
    return compare_records(
        records,
        lambda record: _read(folder, record),
        against=against,
        margin=margin,
        resamples=resamples,
        seed=seed,
        where=str(folder),
    )


def compare_records(
    records: Sequence[Record],
    read: _Read,
    *,
    against: str | None = None,
    margin: float = MARGIN,
    resamples: int = 10_000,
    seed: int = 0,
    where: str = "the run",
) -> list[Comparison]:
    """All comparisons between records; `read` gives the predictions behind one. `where`: for messages."""
    if against is not None and against not in (known := {record.method for record in records}):
        raise RecipeError(f"{where} has no method {against!r} to compare with; {nearest(against, known)}")
    comparisons: list[Comparison] = []
    for way, rows in _families(records):
        if len(rows) > 1:
            reference = against if against in rows else _best(rows)
            pairs = {
                name: _paired(read, row, rows[reference], where) for name, row in rows.items() if name != reference
            }
            comparisons += _compared(way, reference, pairs, margin=margin, resamples=resamples, seed=seed)
    return comparisons


def read_comparisons(path: Path) -> list[Comparison]:
    """The comparisons that a run wrote."""
    items = read_document(path, fix="; compare the run again")
    if not isinstance(items, list):
        raise CheckpointError(f"{path} must be a list of comparisons, got {type(items).__name__}; compare again")
    return [build(Comparison, item, where=f"{path} item {number}") for number, item in enumerate(items, 1)]


def comparison_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """One table for each family."""
    families: dict[tuple[Way, str, tuple[str, ...]], list[Comparison]] = {}
    for item in comparisons:
        families.setdefault((item.way, item.reference, tuple(item.tasks)), []).append(item)
    columns = ("method", "verdict", "difference", "95 %", "p", "better on", "worse on")
    return [
        Table.of(
            f"Against {reference}: {way.title} ({way.access})",
            columns,
            map(_cells, items),
            left=2,
            note=f"Points, paired by input, on {', '.join(tasks)}. Comparable: the difference is less than "
            f"{100 * items[0].equivalence.margin:g} either way, by two one-sided tests. p and the number of tasks "
            "after Holm's correction.",
        )
        for (way, reference, tasks), items in families.items()
    ]


def _cells(item: Comparison) -> tuple[str, ...]:
    gap, count = item.difference, len(item.tasks)
    return (
        item.method,
        item.verdict,
        f"{100 * gap.estimate:+.1f}",
        f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}",
        "<0.001" if item.adjusted < 0.001 else f"{item.adjusted:.3f}",
        f"{len(item.better)} of {count}",
        f"{len(item.worse)} of {count}",
    )


def _families(records: Sequence[Record]) -> list[tuple[Way, dict[str, _Row]]]:
    """Rows by way of reading. A joint label space of other tasks is another way."""
    rows: dict[tuple[Way, str], dict[str, dict[int, Record]]] = {}
    for record in records:
        if record.metric != "accuracy":
            continue
        seeds = rows.setdefault((record.way, record.method), {}).setdefault(record.task, {})
        if record.seed in seeds:
            raise IncompatibleError(
                f"two records of {record.method!r} on {record.task!r} under {record.way.title} have seed "
                f"{record.seed}; evaluate again with this version, which tells them apart"
            )
        seeds[record.seed] = record
    families: dict[tuple[Way, frozenset[str]], dict[str, _Row]] = {}
    for (way, method), row in rows.items():
        space = frozenset(row) if way.protocol == "joint" else frozenset()
        families.setdefault((way, space), {})[method] = row
    return [(way, family) for (way, _), family in families.items()]


def _best(rows: Mapping[str, _Row]) -> str:
    """The best mean among the methods that were scored on the most tasks."""

    def rank(name: str) -> tuple[int, float]:
        row = rows[name]
        return len(row), mean(mean(record.value for record in seeds.values()) for seeds in row.values())

    return max(rows, key=rank)


def _paired(read: _Read, first: _Row, second: _Row, where: str) -> dict[str, tuple[Bools, Bools]]:
    """Hits [seeds, n] of both, by task: only the seeds and the inputs that both were scored on under every seed."""
    shared = [task for task in first if task in second]
    kept = [set(first[task]) & set(second[task]) for task in shared]
    seeds = sorted(set.intersection(*kept)) if kept else []
    found = {}
    for task in shared if seeds else ():
        pair = [[read(row[task][seed]) for seed in seeds] for row in (first, second)]
        truths = [answers.truth for side in pair for answers in side]
        if any(not np.array_equal(truth, truths[0]) for truth in truths):
            names = " and ".join(repr(row[task][seeds[0]].method) for row in (first, second))
            raise IncompatibleError(f"{where}: {names} were not scored on the same inputs of {task!r}; evaluate again")
        scored = np.logical_and.reduce([answers.scored for side in pair for answers in side])
        if scored.any():
            one, other = (np.stack([answers.hits[scored] for answers in side]) for side in pair)
            found[task] = (one, other)
    return found


def _compared(
    way: Way,
    reference: str,
    pairs: Mapping[str, Mapping[str, tuple[Bools, Bools]]],
    *,
    margin: float,
    resamples: int,
    seed: int,
) -> list[Comparison]:
    """One family. A method that shares no task with the reference cannot be compared with it."""
    pairs = {name: tasks for name, tasks in pairs.items() if tasks}
    means, gaps = {}, {}
    tests: dict[tuple[str, str], float] = {}
    for name, tasks in pairs.items():
        sides = ({task: pair[side] for task, pair in tasks.items()} for side in (0, 1))
        means[name], gaps[name] = bootstrap_by_task(*sides, resamples=resamples, seed=seed)
        tests |= {(name, task): mcnemar_hits(*pair) for task, pair in tasks.items()}
    overall, singly = holm({name: gap.p for name, gap in means.items()}), holm(tests)
    return [
        _comparison(
            name,
            reference,
            way,
            difference=means[name],
            adjusted=overall[name],
            margin=margin,
            seeds=max(len(one) for one, _ in tasks.values()),
            tasks={
                task: TaskDifference(
                    gaps[name][task].estimate,
                    gaps[name][task].low,
                    gaps[name][task].high,
                    tests[name, task],
                    singly[name, task],
                    one.shape[1],
                )
                for task, (one, _) in tasks.items()
            },
        )
        for name, tasks in pairs.items()
    ]


def _comparison(
    method: str,
    reference: str,
    way: Way,
    *,
    difference: Difference,
    adjusted: float,
    margin: float,
    seeds: int,
    tasks: dict[str, TaskDifference],
) -> Comparison:
    equivalence = tost(difference, margin=margin, alpha=_ALPHA)
    told = [task for task, gap in tasks.items() if gap.adjusted < _ALPHA]
    apart = "" if adjusted >= _ALPHA else "better" if difference.estimate > 0 else "worse"
    if equivalence.comparable:
        verdict = f"{apart}, but comparable" if apart else "comparable"
    else:
        verdict = apart or "undecided"
    return Comparison(
        method,
        reference,
        way,
        seeds,
        difference,
        adjusted,
        equivalence,
        equivalence.comparable,
        tasks,
        better=tuple(task for task in told if tasks[task].estimate > 0),
        worse=tuple(task for task in told if tasks[task].estimate < 0),
        verdict=verdict,
    )


def _read(folder: Path, record: Record) -> Predictions:
    """The predictions behind a record, which must be those that it was counted from."""
    whose = f"{record.method!r} on {record.task!r}"
    if record.predictions is None:
        raise CheckpointError(f"{folder / _RECORDS} keeps no predictions of {whose}; evaluate again")
    path = folder / record.predictions
    try:
        with path.open("rb") as handle, np.load(handle) as file:
            if "truth" not in file:
                raise CheckpointError(f"{path} does not hold the truth; evaluate again with this version")
            predicted, truth = (np.asarray(file[name], dtype=np.int32) for name in ("predicted", "truth"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; evaluate again") from error
    except (ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged: {error}; evaluate again") from error
    if predicted.ndim != 1 or predicted.shape != truth.shape:
        raise CheckpointError(f"{path} is damaged: {predicted.shape} predictions, {truth.shape} labels; evaluate again")
    answers = Predictions(predicted, truth)
    count, hits = int(answers.scored.sum()), int(answers.hits.sum())
    if count != record.examples or hits != round(record.value * count):
        raise IncompatibleError(
            f"{path} holds {hits} hits of {count} inputs, but {_RECORDS} says {record.value:.4f} of "
            f"{record.examples}; the folder was written over in part: evaluate again"
        )
    return answers
