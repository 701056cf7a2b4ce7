"""Records as tables: one row per method and way of scoring, one column per task, access classes never mixed.

The interval of a mean over tasks reflects the choice of test inputs; deviation and worst seed reflect that of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

from orthomerge.core.table import Cell, Table, Value, number, span
from orthomerge.data.task import Access
from orthomerge.evaluation.metrics import Score, mean_interval
from orthomerge.evaluation.records import Record, Way

TITLES: Mapping[Access, str] = {
    "data-free": "No inputs used",
    "inductive": "Inductive: inputs from train or val, scored on test",
    "transductive": "Transductive: the test inputs themselves, as most papers do",
}
MARKS: Mapping[str, str] = {"reference": "★", "better": "↑", "worse": "↓", "comparable": "≈", "undecided": "?"}


@dataclass(frozen=True)
class Line:
    """One row, in percent: scores by task, averaged over seeds, and their mean with its 95 % interval.

    `spread`: the standard deviation of the mean over seeds; `worst_seed`: the lowest of these means. `verdict`: of the
    comparison with `against`, both empty without one; `reference` for that one. `apart`: tasks on which it is `better`
    or `worse` than the reference (McNemar). `best`: whether its mean is highlighted.
    """

    method: str
    way: Way
    scores: dict[str, Score]
    mean: float
    low: float
    high: float
    worst_seed: float
    spread: float | None
    seeds: int
    extra: int
    verdict: str = ""
    against: str = ""
    apart: Mapping[str, str] = field(default_factory=dict)
    best: bool = False

    @property
    def values(self) -> dict[str, float]:
        return {task: score.value for task, score in self.scores.items()}

    @property
    def mark(self) -> str:
        """Verdict as one or two signs: `worse, but comparable` is `↓≈`."""
        return "".join(sign for word, sign in MARKS.items() if word in self.verdict)


@dataclass(frozen=True)
class LineColumn:
    """A column beside the accuracies. `key`: its name in CSV; `seeds`: only for lines of several seeds."""

    key: str
    name: str
    title: str
    value: Callable[[Line], float | None]
    form: str = ".1f"
    seeds: bool = False

    def cell(self, line: Line) -> Cell:
        return number(self.value(line), self.form)


# The same in tables, on the page of a report and in its files.
COLUMNS = (
    LineColumn("sd", "sd", "standard deviation of the mean over seeds", lambda line: line.spread, seeds=True),
    LineColumn("worst_seed", "worst", "the mean under the worst seed", lambda line: line.worst_seed, seeds=True),
    LineColumn("seeds", "seeds", "number of seeds", lambda line: line.seeds, "d", seeds=True),
    LineColumn(
        "extra_parameters",
        "extra",
        "numbers that inference needs beyond encoder and heads",
        lambda line: line.extra,
        ",",
    ),
)


def columns_of(rows: Sequence[Line], *, extra: bool) -> list[LineColumn]:
    """Select columns: those about seeds if a row has several, extra parameters if `extra`."""
    several = any(row.seeds > 1 for row in rows)
    return [column for column in COLUMNS if (several if column.seeds else extra)]


def lines(records: Iterable[Record]) -> list[Line]:
    """Average records over seeds, in the order in which they were measured."""
    groups: dict[tuple[str, Way], list[Record]] = {}
    for record in records:
        groups.setdefault((record.method, record.way), []).append(record)
    return [_line(method, way, group) for (method, way), group in groups.items()]


def accuracy_tables(records: Sequence[Record]) -> list[Table]:
    """Make one table per access class that occurs, data-free and inductive first."""
    tasks, rows = list(dict.fromkeys(record.task for record in records)), lines(records)
    groups = ((title, [row for row in rows if row.way.access == access]) for access, title in TITLES.items())
    return [accuracy_table(title, group, tasks) for title, group in groups if group]


def accuracy_table(
    title: str, rows: Sequence[Line], tasks: Sequence[str], *, extra: bool = False, note: str = ""
) -> Table:
    """Make the table of one access class. `extra`: whether extra parameters are shown."""
    columns, compared = columns_of(rows, extra=extra), any(row.verdict for row in rows)
    reference = ["ref."] if compared else []
    names = ["method", "protocol", *tasks, "mean", "95 %", *reference, *(column.name for column in columns)]
    cells: list[list[Cell | Value]] = [
        [
            row.method,
            row.way.title,
            *(number(row.values.get(task)) for task in tasks),
            number(row.mean, best=row.best),
            span(row.low, row.high),
            *([row.mark] if compared else []),
            *(column.cell(row) for column in columns),
        ]
        for row in rows
    ]
    return Table.of(title, names, cells, left=2, note=note)


def _line(method: str, way: Way, group: Sequence[Record]) -> Line:
    by_task: dict[str, list[Record]] = {}
    by_seed: dict[int, list[float]] = {}
    for record in group:
        by_task.setdefault(record.task, []).append(record)
        by_seed.setdefault(record.seed, []).append(100 * record.value)
    means = [mean(values) for values in by_seed.values()]
    scores = {}
    for task, part in by_task.items():
        value, low, high = (100 * mean(getattr(record, name) for record in part) for name in ("value", "low", "high"))
        scores[task] = Score(value, low, high, part[-1].examples)
    return Line(
        method,
        way,
        scores,
        *mean_interval(scores.values()),
        worst_seed=min(means),
        spread=stdev(means) if len(means) > 1 else None,
        seeds=len(means),
        extra=max(record.extra_parameters for record in group),
    )
