"""Records as tables: a row for each method and way of reading, a column for each task, access classes never mixed.

The interval of a mean over tasks (`metrics.mean_interval`) says what other test inputs could change. What other seeds
could change is in the deviation, and in the worst seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import mean, stdev

from orthomerge.core.table import Cell, Table, number, span
from orthomerge.data.task import Access
from orthomerge.evaluation.metrics import Score, mean_interval
from orthomerge.evaluation.records import Record, Way

TITLES: Mapping[Access, str] = {
    "data-free": "No inputs used",
    "inductive": "Inductive: inputs from train or val, scored on test",
    "transductive": "Transductive: the test inputs themselves, as most papers do",
}


@dataclass(frozen=True)
class Line:
    """One row: accuracies with their intervals by task, averaged over seeds, and their mean with its 95 % interval; all
    in percent.

    `spread` is the deviation of the mean over seeds, `worst_seed` the lowest of these means, `extra` how many numbers
    inference needs beyond encoder and heads.
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

    @property
    def values(self) -> dict[str, float]:
        return {task: score.value for task, score in self.scores.items()}

    @property
    def protocol(self) -> str:
        return self.way.protocol

    @property
    def shots(self) -> int | float | None:
        return self.way.shots

    @property
    def access(self) -> Access:
        return self.way.access

    @property
    def title(self) -> str:
        return self.way.title


@dataclass(frozen=True)
class LineColumn:
    """A number of a line beyond its accuracies. `key`: its name for programs; `seeds`: it is about several seeds."""

    key: str
    name: str
    title: str
    value: Callable[[Line], float | None]
    form: str = ".1f"
    seeds: bool = False

    def cell(self, line: Line) -> Cell:
        return number(self.value(line), self.form)


# Every table, the page of a report and its files have these columns.
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
    """Those about seeds where a row has several, the others if they are wanted."""
    several = any(row.seeds > 1 for row in rows)
    return [column for column in COLUMNS if (several if column.seeds else extra)]


def lines(records: Iterable[Record]) -> list[Line]:
    """Rows in the order in which they were measured."""
    groups: dict[tuple[str, Way], list[Record]] = {}
    for record in records:
        if record.headline:
            groups.setdefault((record.method, record.way), []).append(record)
    return [_line(method, way, group) for (method, way), group in groups.items()]


def accuracy_tables(records: Sequence[Record]) -> list[Table]:
    """One table per access class that occurs, data-free and inductive first."""
    tasks = list(dict.fromkeys(record.task for record in records))
    rows = lines(records)
    groups = ((title, [row for row in rows if row.access == access]) for access, title in TITLES.items())
    return [accuracy_table(title, group, tasks) for title, group in groups if group]


def accuracy_table(
    title: str,
    rows: Sequence[Line],
    tasks: Sequence[str],
    *,
    best: Line | None = None,
    marks: Sequence[str] | None = None,
    extra: bool = False,
    note: str = "",
) -> Table:
    """Rows of one access class. `marks`: a sign per row that says how it compares; `best`: its mean stands out.

    `extra`: whether the column about extra parameters is shown.
    """
    columns = columns_of(rows, extra=extra)

    def cells(row: Line, mark: str | None) -> list[tuple[str, Cell]]:
        return [
            ("method", Cell(row.method)),
            ("protocol", Cell(row.title)),
            *((task, number(row.values.get(task))) for task in tasks),
            ("mean", number(row.mean, best=row is best)),
            ("95 %", span(row.low, row.high)),
            *([("ref.", Cell(mark))] if mark is not None else []),
            *((column.name, column.cell(row)) for column in columns),
        ]

    named = [cells(row, mark) for row, mark in zip(rows, marks or repeat(None, len(rows)), strict=True)]
    names = [name for name, _ in named[0]]
    return Table.of(title, names, ([cell for _, cell in row] for row in named), left=2, note=note)


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
    middle, low, high = mean_interval(scores.values())
    return Line(
        method,
        way,
        scores,
        mean=middle,
        low=low,
        high=high,
        worst_seed=min(means),
        spread=stdev(means) if len(means) > 1 else None,
        seeds=len(means),
        extra=max(record.extra_parameters for record in group),
    )
