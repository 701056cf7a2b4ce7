"""What tables and figures are made of, as CSV: one row a number, nothing rounded."""

from __future__ import annotations

from collections.abc import Sequence

from orthomerge.analysis.figures import Bars, Figure, Heat, Lines, Points
from orthomerge.evaluation.comparisons import Comparison
from orthomerge.report.formats import Value, csv_text
from orthomerge.report.tables import Board

__all__ = ["board_csv", "comparisons_csv", "figure_csv"]


def board_csv(board: Board) -> str:
    """The table with its intervals in columns of their own, and those of every task after the tasks."""
    head = ["access", "method", "protocol", *board.tasks, "mean", "low", "high", "verdict", "against"]
    head += ["sd", "worst_seed", "seeds", "extra_parameters"]
    head += [f"{task} {end}" for task in board.tasks for end in ("low", "high", "examples")]
    rows: list[list[Value]] = []
    for row in board.rows:
        line, cells = row.line, [row.cells.get(task) for task in board.tasks]
        told: list[Value] = [line.access, line.method, line.title]
        told += [cell.value if cell else None for cell in cells]
        told += [line.mean, line.low, line.high, row.verdict, row.against, line.spread, line.worst_seed, line.seeds]
        told.append(row.extra)
        for cell in cells:
            told += [cell.low, cell.high, cell.examples] if cell else [None, None, None]
        rows.append(told)
    return csv_text(head, rows)


def comparisons_csv(comparisons: Sequence[Comparison]) -> str:
    """Every comparison, in points."""
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


def figure_csv(figure: Figure) -> str:
    """The numbers behind a figure."""
    if isinstance(figure, Lines):
        return _lines(figure)
    if isinstance(figure, Heat):
        body: list[list[Value]] = [[name, *values] for name, values in zip(figure.rows, figure.values, strict=True)]
        return csv_text(["", *figure.columns], body)
    return _bars(figure) if isinstance(figure, Bars) else _points(figure)


def _lines(figure: Lines) -> str:
    rows: list[list[Value]] = []
    for curve in figure.curves:
        low, high = curve.low or (None,) * len(curve.x), curve.high or (None,) * len(curve.x)
        rows += [[curve.name, *numbers] for numbers in zip(curve.x, curve.y, low, high, strict=True)]
    return csv_text(["curve", "x", "y", "low", "high"], rows)


def _bars(figure: Bars) -> str:
    rows: list[list[Value]] = []
    for series in figure.series:
        none = (None,) * len(series.values)
        numbers = zip(figure.groups, series.values, series.low or none, series.high or none, strict=True)
        rows += [[group, series.name, *rest] for group, *rest in numbers]
    return csv_text(["group", "series", "value", "low", "high"], rows)


def _points(figure: Points) -> str:
    """Classes by name; an input is known by its number and, where there is one, its text."""
    head = ["input", "true"]
    for view in figure.views:
        head += [f"{view.name} x", f"{view.name} y", f"{view.name} predicted"]
    head += ["text"] if figure.texts else []
    rows: list[list[Value]] = []
    for number, true in enumerate(figure.true):
        row: list[Value] = [number, _class(figure, true)]
        for view in figure.views:
            row += [view.x[number], view.y[number], _class(figure, view.predicted[number])]
        rows.append([*row, *([figure.texts[number]] if figure.texts else [])])
    return csv_text(head, rows)


def _class(figure: Points, number: int) -> str:
    return figure.classes[number] if 0 <= number < len(figure.classes) else ""
