"""Every method of a run against one of them, from the predictions that the run kept: no model is needed.

Methods are compared where they were scored under the same protocol (with options, shots, access, support), on the
tasks, seeds and inputs that both were scored on. One protocol with its methods is a *family*, over which Holm's
correction runs. The reference is the method with the best mean unless another is named; since the best was chosen on
these very inputs, its lead is slightly overestimated.

A task is won or lost by exact McNemar. Over several seeds an input counts for the method that was right under more of
them, so that test is about these seeds; the interval of the mean is about other seeds too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from orthomerge.core.errors import IncompatibleError, RecipeError, nearest
from orthomerge.core.table import Table
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.statistics import Difference, Equivalence, bootstrap, holm, mcnemar_hits, tost

MARGIN = 0.01  # below one point either way two methods may be called comparable
_ALPHA = 0.05
_COLUMNS = ("method", "verdict", "difference", "95 %", "p", "better on", "worse on")

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
        return np.not_equal(self.predicted, UNSCORED)

    @property
    def hits(self) -> Bools:
        """Which inputs were right."""
        return np.equal(self.predicted, self.truth) & self.scored


_Row = Mapping[str, Mapping[int, Record]]  # one method: task, seed
_Read = Callable[[Record], Predictions]
_Hits = dict[str, tuple[Bools, Bools]]  # by task [seeds, n], of a method and of the reference


def compare_records(
    records: Sequence[Record],
    read: _Read,
    *,
    against: str | None = None,
    margin: float = MARGIN,
) -> list[Comparison]:
    """All comparisons between records; `read` gives the predictions behind one.

    `against`: the reference wherever it was scored; elsewhere it is the best.
    """
    methods = {record.method for record in records}
    if against is not None and against not in methods:
        raise RecipeError(f"there are no records of {against!r} to compare with; {nearest(against, methods)}")
    comparisons: list[Comparison] = []
    for way, rows in _families(records):
        reference = against if against in rows else max(rows, key=lambda name: _rank(rows[name]))
        hits = {name: _paired_hits(read, row, rows[reference]) for name, row in rows.items() if name != reference}
        comparisons += _compared(way, reference, {name: tasks for name, tasks in hits.items() if tasks}, margin)
    return comparisons


def comparison_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """One table for each family."""
    families: dict[tuple[Way, str, tuple[str, ...]], list[Comparison]] = {}
    for item in comparisons:
        families.setdefault((item.way, item.reference, tuple(item.tasks)), []).append(item)
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
    """Rows by protocol. A joint label space of other tasks is another family."""
    rows: dict[tuple[Way, str], dict[str, dict[int, Record]]] = {}
    for record in records:
        if not record.headline:
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


def _rank(row: _Row) -> tuple[int, float]:
    """The best method is the one with the best mean among those that were scored on the most tasks."""
    return len(row), mean(mean(record.value for record in seeds.values()) for seeds in row.values())


def _paired_hits(read: _Read, first: _Row, second: _Row) -> _Hits:
    """Hits of both by task: only the seeds and the inputs that both were scored on under every seed."""
    shared = [task for task in first if task in second]
    kept = [set(first[task]) & set(second[task]) for task in shared]
    seeds = sorted(set.intersection(*kept)) if kept else []
    paired: _Hits = {}
    for task in shared if seeds else ():
        pair = [[read(row[task][seed]) for seed in seeds] for row in (first, second)]
        truths = [answers.truth for side in pair for answers in side]
        if any(not np.array_equal(truth, truths[0]) for truth in truths):
            names = " and ".join(repr(row[task][seeds[0]].method) for row in (first, second))
            raise IncompatibleError(f"{names} were not scored on the same inputs of {task!r}; evaluate again")
        scored = np.logical_and.reduce([answers.scored for side in pair for answers in side])
        if scored.any():
            one, other = (np.stack([answers.hits[scored] for answers in side]) for side in pair)
            paired[task] = (one, other)
    return paired


def _compared(way: Way, reference: str, hits: Mapping[str, _Hits], margin: float) -> list[Comparison]:
    """One family: the tests of all methods, corrected together."""
    bootstraps = {}
    tests: dict[tuple[str, str], float] = {}
    for name, pairs in hits.items():
        first, second = ({task: pair[side] for task, pair in pairs.items()} for side in (0, 1))
        bootstraps[name] = bootstrap(first, second)
        tests |= {(name, task): mcnemar_hits(*pair) for task, pair in pairs.items()}
    adjusted, singly = holm({name: overall.p for name, (overall, _) in bootstraps.items()}), holm(tests)
    comparisons = []
    for name, (difference, by_task) in bootstraps.items():
        seeds, tasks = 1, {}
        for task, gap in by_task.items():
            seeds, inputs = hits[name][task][0].shape
            p = (tests[name, task], singly[name, task])
            tasks[task] = TaskDifference(gap.estimate, gap.low, gap.high, *p, inputs)
        equivalence = tost(difference, margin=margin, alpha=_ALPHA)
        apart = {task: gap.estimate for task, gap in tasks.items() if gap.adjusted < _ALPHA}
        comparisons.append(
            Comparison(
                name,
                reference,
                way,
                seeds,
                difference,
                adjusted[name],
                equivalence,
                comparable=equivalence.comparable,
                tasks=tasks,
                better=tuple(task for task, estimate in apart.items() if estimate > 0),
                worse=tuple(task for task, estimate in apart.items() if estimate < 0),
                verdict=_verdict(difference, adjusted[name], comparable=equivalence.comparable),
            )
        )
    return comparisons


def _verdict(difference: Difference, adjusted: float, *, comparable: bool) -> str:
    apart = "" if adjusted >= _ALPHA else "better" if difference.estimate > 0 else "worse"
    if comparable:
        return f"{apart}, but comparable" if apart else "comparable"
    return apart or "undecided"
