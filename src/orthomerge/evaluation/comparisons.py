"""Compare every method of a run with a reference, from the predictions of both.

Methods are compared where they were scored under the same protocol (with options, shots, access, support), on the
tasks, seeds and inputs that both were scored on. Holm's correction runs over all methods of one protocol. The best mean
is the reference unless another is named; as it is chosen on the same inputs, its lead is slightly overestimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from orthomerge.core.errors import IncompatibleError, RecipeError, nearest
from orthomerge.core.table import Table
from orthomerge.evaluation.metrics import UNSCORED, Difference, Equivalence, bootstrap, holm, mcnemar_hits, tost
from orthomerge.evaluation.records import Record, Way

MARGIN = 0.01  # differences below one point may be called comparable
_ALPHA = 0.05
_COLUMNS = ("method", "verdict", "difference", "95 %", "p", "better on", "worse on")

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TaskDifference:
    """Difference on one task with its 95 % interval, McNemar's p-value, and `adjusted`: p after Holm's correction."""

    estimate: float
    low: float
    high: float
    p: float
    adjusted: float
    examples: int


@dataclass(frozen=True)
class Comparison:
    """`method` minus `reference`, in shares. `adjusted`: the mean's p-value after Holm's correction. `better` and
    `worse`: tasks on which McNemar's test is significant after Holm's correction.
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
    """Predicted and true classes [n] of every test input, in the same label space."""

    predicted: NDArray[np.int32]
    truth: NDArray[np.int32]

    @property
    def scored(self) -> Bools:
        return np.not_equal(self.predicted, UNSCORED)

    @property
    def hits(self) -> Bools:
        return np.equal(self.predicted, self.truth) & self.scored


_Row = dict[str, dict[int, Record]]  # records of one method by task and seed
_Hits = dict[str, Bools]  # [seeds, n] by task


def compare_records(
    records: Sequence[Record],
    predictions: Mapping[str, Predictions],
    *,
    against: str | None = None,
    margin: float = MARGIN,
) -> list[Comparison]:
    """Compare all methods with `against` where it was scored, else with the best, from predictions by file name."""
    methods = {record.method for record in records}
    if against is not None and against not in methods:
        raise RecipeError(f"there are no records of {against!r} to compare with; {nearest(against, methods)}")
    comparisons: list[Comparison] = []
    for way, rows in _rows_by_way(records):
        reference = against if against in rows else max(rows, key=lambda name: _rank(rows[name]))
        best = rows.pop(reference)
        pairs = {name: _paired_hits(predictions, row, best) for name, row in rows.items()}
        comparisons += _compare(way, reference, {name: pair for name, pair in pairs.items() if pair[0]}, margin)
    return comparisons


def comparison_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    groups: dict[tuple[Way, str, tuple[str, ...]], list[Comparison]] = {}
    for item in comparisons:
        groups.setdefault((item.way, item.reference, tuple(item.tasks)), []).append(item)
    return [
        Table.of(
            f"Against {reference}: {way.title} ({way.access})",
            _COLUMNS,
            map(_cells, items),
            left=2,
            note=f"Points, paired by input, on {', '.join(tasks)}. Comparable: the difference is less than "
            f"{100 * items[0].equivalence.margin:g} either way, by two one-sided tests. p and the number of tasks "
            "after Holm's correction.",
        )
        for (way, reference, tasks), items in groups.items()
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


def _rows_by_way(records: Sequence[Record]) -> list[tuple[Way, dict[str, _Row]]]:
    """Group records by protocol and method; joint label spaces of different tasks are not compared."""
    rows: dict[tuple[Way, str], _Row] = {}
    for record in records:
        seeds = rows.setdefault((record.way, record.method), {}).setdefault(record.task, {})
        if record.seed in seeds:
            raise IncompatibleError(
                f"two records of {record.method!r} on {record.task!r} under {record.way.title} have seed "
                f"{record.seed}; evaluate again with this version, which distinguishes them"
            )
        seeds[record.seed] = record
    groups: dict[tuple[Way, frozenset[str]], dict[str, _Row]] = {}
    for (way, method), row in rows.items():
        label_space = frozenset(row) if way.protocol == "joint" else frozenset()
        groups.setdefault((way, label_space), {})[method] = row
    return [(way, group) for (way, _), group in groups.items()]


def _rank(row: _Row) -> tuple[int, float]:
    """Return the sort key of a method: number of tasks, then mean accuracy."""
    return len(row), mean(mean(record.value for record in seeds.values()) for seeds in row.values())


def _paired_hits(predictions: Mapping[str, Predictions], first: _Row, second: _Row) -> tuple[_Hits, _Hits]:
    """Return the hits of two methods on the tasks, seeds and inputs that both were scored on."""
    shared = [task for task in first if task in second]
    common = [set(first[task]) & set(second[task]) for task in shared]
    seeds = sorted(set.intersection(*common)) if common else []
    hits: tuple[_Hits, _Hits] = ({}, {})
    for task in shared if seeds else ():
        pair = [[predictions[str(row[task][seed].predictions)] for seed in seeds] for row in (first, second)]
        both = [*pair[0], *pair[1]]
        if any(not np.array_equal(item.truth, both[0].truth) for item in both):
            names = " and ".join(repr(row[task][seeds[0]].method) for row in (first, second))
            raise IncompatibleError(f"{names} were not scored on the same inputs of {task!r}; evaluate again")
        scored = np.logical_and.reduce([item.scored for item in both])
        if scored.any():
            for side, by_seed in zip(hits, pair, strict=True):
                side[task] = np.stack([item.hits[scored] for item in by_seed])
    return hits


def _compare(way: Way, reference: str, pairs: Mapping[str, tuple[_Hits, _Hits]], margin: float) -> Iterator[Comparison]:
    """Compare the methods of one protocol with the reference; their tests are corrected together."""
    differences = {name: bootstrap(*pair) for name, pair in pairs.items()}
    tests = {(name, task): mcnemar_hits(own[task], other[task]) for name, (own, other) in pairs.items() for task in own}
    adjusted, adjusted_tests = holm({name: mean_gap.p for name, (mean_gap, _) in differences.items()}), holm(tests)
    for name, (difference, by_task) in differences.items():
        tasks = {}
        for task, gap in by_task.items():
            seeds, inputs = pairs[name][0][task].shape
            p = (tests[name, task], adjusted_tests[name, task])
            tasks[task] = TaskDifference(gap.estimate, gap.low, gap.high, *p, inputs)
        equivalence = tost(difference, margin=margin, alpha=_ALPHA)
        significant = {task: gap.estimate for task, gap in tasks.items() if gap.adjusted < _ALPHA}
        yield Comparison(
            name,
            reference,
            way,
            seeds,
            difference,
            adjusted[name],
            equivalence,
            equivalence.comparable,
            tasks,
            better=tuple(task for task, estimate in significant.items() if estimate > 0),
            worse=tuple(task for task, estimate in significant.items() if estimate < 0),
            verdict=_verdict(difference, adjusted[name], comparable=equivalence.comparable),
        )


def _verdict(difference: Difference, adjusted: float, *, comparable: bool) -> str:
    direction = "" if adjusted >= _ALPHA else "better" if difference.estimate > 0 else "worse"
    if comparable:
        return f"{direction}, but comparable" if direction else "comparable"
    return direction or "undecided"
