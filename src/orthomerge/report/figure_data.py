"""The numbers behind a figure as CSV: one row per number, nothing rounded."""

from __future__ import annotations

from orthomerge.analysis.figures import Bars, Figure, Heat, Lines, Points
from orthomerge.core.table import Value, csv_text


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
