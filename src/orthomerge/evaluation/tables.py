"""Records as tables: a row for each method and way of reading, a column for each task, access classes never mixed.

The interval of a mean over tasks is put together from those of the tasks (Zou and Donner 2008, MOVER): with m the mean
of v_t, and [l_t, u_t] the interval of each of T tasks,

    low = m - sqrt(sum_t (v_t - l_t)^2) / T,    high = m + sqrt(sum_t (u_t - v_t)^2) / T.

It says what other test inputs could change. What other seeds could change is in the deviation, and in the worst seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from orthomerge.records import Access, Record, Way

__all__ = ["TITLES", "Line", "Sheet", "lines", "markdown", "sheets"]

TITLES: Mapping[Access, str] = {
    "data-free": "No inputs used",
    "inductive": "Inductive: inputs from train or val, scored on test",
    "transductive": "Transductive: the test inputs themselves, as most papers do",
}


@dataclass(frozen=True)
class Sheet:
    """A table in words, ready to be printed; the first `left` columns are text, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    note: str = ""

    def markdown(self) -> str:
        rule = "|" + "---|" * self.left + "---:|" * (len(self.columns) - self.left)
        head, *body = (f"| {' | '.join(cells)} |" for cells in (self.columns, *self.rows))
        return "\n".join((f"### {self.title}", "", head, rule, *body, *(("", self.note) if self.note else ())))


@dataclass(frozen=True)
class Line:
    """One row: accuracies in percent by task, averaged over seeds, and their mean with its 95 % interval.

    `spread` is the deviation of the mean over seeds, `worst_seed` the lowest of these means.
    """

    method: str
    way: Way
    values: dict[str, float]
    mean: float
    low: float
    high: float
    worst_seed: float
    spread: float | None
    seeds: int

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


def lines(records: Iterable[Record]) -> list[Line]:
    """Rows in the order in which they were measured."""
    groups: dict[tuple[str, Way], list[Record]] = {}
    for record in records:
        if record.metric == "accuracy":
            groups.setdefault((record.method, record.way), []).append(record)
    return [_line(method, way, group) for (method, way), group in groups.items()]


def sheets(records: Sequence[Record]) -> list[Sheet]:
    """One table per access class that occurs, data-free and inductive first."""
    tasks = list(dict.fromkeys(record.task for record in records))
    rows = lines(records)
    found = []
    for access, title in TITLES.items():
        chosen = [row for row in rows if row.access == access]
        if chosen:
            found.append(_sheet(title, tasks, chosen))
    return found


def markdown(records: Sequence[Record]) -> str:
    """All tables of some records."""
    return "\n\n".join(sheet.markdown() for sheet in sheets(records))


def _line(method: str, way: Way, group: Sequence[Record]) -> Line:
    by_task: dict[str, list[Record]] = {}
    by_seed: dict[int, list[float]] = {}
    for record in group:
        by_task.setdefault(record.task, []).append(record)
        by_seed.setdefault(record.seed, []).append(100 * record.value)
    means = [mean(values) for values in by_seed.values()]
    values, lows, highs = (
        {task: 100 * mean(getattr(record, end) for record in part) for task, part in by_task.items()}
        for end in ("value", "low", "high")
    )
    middle = mean(values.values())
    return Line(
        method,
        way,
        values,
        mean=middle,
        low=middle - math.hypot(*(values[task] - lows[task] for task in values)) / len(values),
        high=middle + math.hypot(*(highs[task] - values[task] for task in values)) / len(values),
        worst_seed=min(means),
        spread=stdev(means) if len(means) > 1 else None,
        seeds=len(means),
    )


def _sheet(title: str, tasks: Sequence[str], rows: Sequence[Line]) -> Sheet:
    several = any(row.seeds > 1 for row in rows)
    cells = []
    for row in rows:
        over = ("", "", "") if row.spread is None else (f"{row.spread:.1f}", f"{row.worst_seed:.1f}", str(row.seeds))
        cells.append((row.method, row.title, *_numbers(row, tasks), *(over if several else ())))
    columns = ("method", "protocol", *tasks, "mean", "95 %", *(("sd", "worst", "seeds") if several else ()))
    return Sheet(title, columns, tuple(cells), left=2)


def _numbers(row: Line, tasks: Sequence[str]) -> tuple[str, ...]:
    values = (f"{row.values[task]:.1f}" if task in row.values else "" for task in tasks)
    return (*values, f"{row.mean:.1f}", f"{row.low:.1f}-{row.high:.1f}")
