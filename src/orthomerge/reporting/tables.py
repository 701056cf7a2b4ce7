"""Accuracy tables of a report, and a summary of the run in one sentence.

There is one table per access class, with one row per method and protocol: a line of `evaluation.tables` with the
outcome of the run's comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orthomerge.analysis.diagnosis import Bars, Series
from orthomerge.core.table import Table, Value, csv_text
from orthomerge.data.task import Access
from orthomerge.evaluation.comparisons import Comparison
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.tables import COLUMNS, MARKS, TITLES, Line, LineColumn, accuracy_table, columns_of, lines

REFERENCES = ("expert", "base", "mtl")  # what merges are compared with
_ORDER: tuple[Access, ...] = ("inductive", "data-free", "transductive")
_NAN = float("nan")
_EXACT = 0.05  # points: smaller differences are not printed


@dataclass(frozen=True)
class Board:
    """Rows of one table. `key`: the access class. `margin`: that of its comparisons, if they share one."""

    key: Access
    tasks: tuple[str, ...]
    rows: tuple[Line, ...]
    margin: float | None = None

    @property
    def title(self) -> str:
        return TITLES[self.key]

    @property
    def columns(self) -> list[LineColumn]:
        return columns_of(self.rows, extra=True)


def boards(records: Sequence[Record], comparisons: Sequence[Comparison] = ()) -> list[Board]:
    """Return one table per access class that occurs, inductive first."""
    tasks = tuple(dict.fromkeys(record.task for record in records))
    outcomes: dict[tuple[str, Way], dict[str, Any]] = {
        (item.reference, item.way): {"verdict": "reference"} for item in comparisons
    }
    for item in comparisons:
        apart = {**dict.fromkeys(item.worse, "worse"), **dict.fromkeys(item.better, "better")}
        outcomes[item.method, item.way] = {"verdict": item.verdict, "against": item.reference, "apart": apart}
    rows = [replace(line, **outcomes.get((line.method, line.way), {})) for line in lines(records)]
    tables = []
    for access in _ORDER:
        # Accuracies in a joint label space cannot be compared with others, so these rows are last.
        group = sorted((row for row in rows if row.way.access == access), key=lambda row: row.way.protocol == "joint")
        if group:
            margins = {item.equivalence.margin for item in comparisons if item.way.access == access}
            margin = margins.pop() if len(margins) == 1 else None
            tables.append(Board(access, tasks, _with_best(group), margin))
    return tables


def _with_best(rows: Sequence[Line]) -> tuple[Line, ...]:
    """Mark the best mean of merges that need nothing beyond encoder and heads, on the most tasks; no probes."""
    merges = [row for row in rows if not row.extra and row.method not in REFERENCES and row.way.protocol != "probe"]
    best = max(merges, key=lambda row: (len(row.scores), row.mean), default=None)
    return tuple(replace(row, best=row is best) for row in rows)


def legend(board: Board) -> str:
    if not any(row.verdict for row in board.rows):
        return ""
    margin = (
        "the margin" if board.margin is None else f"{100 * board.margin:g} point{'s' if board.margin != 0.01 else ''}"
    )
    return (
        f"{MARKS['reference']} what the others that were scored in the same way are compared with; "
        f"{MARKS['better']} better, {MARKS['worse']} worse than it (paired bootstrap, Holm, p < 0.05); "
        f"{MARKS['comparable']} comparable: less than {margin} apart by two one-sided tests; "
        f"{MARKS['undecided']} undecided."
    )


def board_table(board: Board) -> Table:
    extra = "extra: numbers that inference needs beyond encoder and heads."
    note = " ".join(part for part in ("Accuracy in percent.", legend(board), extra) if part)
    return accuracy_table(board.title, board.rows, board.tasks, extra=True, note=note)


def board_csv(board: Board) -> str:
    """Format a table as unrounded CSV; intervals have columns of their own, those of tasks at the end."""
    head = ["access", "method", "protocol", *board.tasks, "mean", "low", "high", "verdict", "against"]
    head += [column.key for column in COLUMNS]
    head += [f"{task} {end}" for task in board.tasks for end in ("low", "high", "examples")]
    rows: list[list[Value]] = []
    for row in board.rows:
        cells: list[Value] = [row.way.access, row.method, row.way.title]
        cells += [row.values.get(task) for task in board.tasks]
        cells += [row.mean, row.low, row.high, row.verdict, row.against]
        cells += [column.value(row) for column in COLUMNS]
        for score in map(row.scores.get, board.tasks):
            cells += [score.low, score.high, score.examples] if score else [None, None, None]
        rows.append(cells)
    return csv_text(head, rows)


def comparisons_csv(comparisons: Sequence[Comparison]) -> str:
    head = ["access", "protocol", "method", "against", "verdict", "difference", "low", "high", "p", "p_adjusted"]
    head += ["seeds", "margin", "better_on", "worse_on"]
    rows: list[list[Value]] = [
        [
            item.way.access, item.way.title, item.method, item.reference, item.verdict,
            100 * item.difference.estimate, 100 * item.difference.low, 100 * item.difference.high,
            item.difference.p, item.adjusted, item.seeds, 100 * item.equivalence.margin,
            "; ".join(item.better), "; ".join(item.worse),
        ]
        for item in comparisons
    ]  # fmt: skip
    return csv_text(head, rows)


@dataclass(frozen=True)
class Summary:
    """A sentence, and the lines of `Experts`, `Merged` and `Aligned`, in this order, if they were measured."""

    sentence: str
    steps: dict[str, Line]
    tasks: tuple[str, ...]


def summarise(boards: Sequence[Board], *, method: str | None = None) -> Summary:
    """Describe a run in one sentence. `method`: the merge to describe, by default the best aligned one."""
    lines, tasks = [row for board in boards for row in board.rows], boards[0].tasks
    current = {line.method: line for line in reversed(lines) if line.way.protocol == "current" and not line.way.aligner}
    merges = {name: line for name, line in current.items() if name not in REFERENCES}
    expert, aligned = current.get("expert"), _best_aligned([line for line in lines if line.method in merges], method)
    merged = merges[aligned.method] if aligned else merges.get(method or "") or _best(merges.values())
    measured = {"Experts": expert, "Merged": merged, "Aligned": aligned}
    steps = {title: line for title, line in measured.items() if line is not None}
    return Summary(_sentence(expert, merged, aligned, len(tasks)), steps, tasks)


def summary_bars(summary: Summary) -> Bars | None:
    if len(summary.steps) < 2:
        return None
    series = []
    for title, line in summary.steps.items():
        scores = [line.scores.get(task) for task in summary.tasks]
        values, low, high = (tuple(getattr(score, name, _NAN) for score in scores) for name in ("value", "low", "high"))
        series.append(Series(title.lower(), values, low, high))
    merge = summary.steps["Merged"].method
    caption = f"Accuracy on each task, with 95 % intervals over test inputs. The merge is {merge}."
    return Bars("accuracy-by-task", "Task by task", caption, summary.tasks, "accuracy, %", tuple(series))


def _best_aligned(lines: Sequence[Line], method: str | None) -> Line | None:
    """Return the best merge aligned without labels; transductive ones only if there are no others."""
    aligned = [
        line
        for line in lines
        if line.way.protocol == "aligned-c" or (line.way.aligner and line.way.protocol != "joint")
    ]
    aligned = [line for line in aligned if line.method == method] or aligned
    return _best([line for line in aligned if line.way.access == "inductive"]) or _best(aligned)


def _best(lines: Iterable[Line]) -> Line | None:
    return max(lines, key=lambda line: line.mean, default=None)


def _sentence(expert: Line | None, merged: Line | None, aligned: Line | None, tasks: int) -> str:
    over = f"over {tasks} tasks" if tasks > 1 else "on one task"
    parts = []
    if expert:
        parts.append(f"The experts score {expert.mean:.1f} % {over}.")
    if merged:
        where = "" if expert else f" {over}"
        parts.append(f"Merged into one encoder by {merged.method}, the model reaches {merged.mean:.1f} %{where}.")
    if merged and aligned:
        text = f"With its heads aligned it reaches {aligned.mean:.1f} %"
        if expert and expert.mean - merged.mean > _EXACT and aligned.mean > merged.mean:
            share = (aligned.mean - merged.mean) / (expert.mean - merged.mean)
            text += f": {100 * min(share, 1):.0f} % of what merging had lost is recovered"
        if aligned.extra == 0:
            text += ", without a single new parameter"
        if aligned.way.access == "transductive":
            text += " (aligned on the test inputs themselves)"
        parts.append(f"{text}.")
    return " ".join(parts) or f"Accuracy {over}."
