"""A number for every row and column."""

from __future__ import annotations

from typing import Any

import numpy as np

from orthomerge.analysis.figures import Heat
from orthomerge.report.drawings.style import COLUMN, INK, RULE, WIDE, shown

_MOST_NUMBERS = 160  # cells that are small enough to be written out in
_SIDE = 0.31  # inches


def draw_heat(figure: Heat) -> Any:
    """Numbers are written into the cells while there is room; missing ones stay empty."""
    from matplotlib.figure import Figure

    values = np.ma.masked_invalid(np.asarray(figure.values, dtype=np.float64).reshape(len(figure.rows), -1))
    rows, columns = values.shape
    side = min(_SIDE, (WIDE - 1.8) / max(columns, 1), 6.5 / max(rows, 1))
    width = min(max(columns * side + 1.6, COLUMN), WIDE)
    drawing = Figure(figsize=(width, min(max(rows * side + 1.0, 2.2), 8.5)), layout="constrained")
    axes = drawing.add_subplot()
    colours, low, high = _scale(figure, values)
    mesh = axes.pcolormesh(values, cmap=colours, vmin=low, vmax=high, edgecolors="face", linewidth=0.3)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(columns) + 0.5, [shown(name, most=20) for name in figure.columns])
    axes.set_yticks(np.arange(rows) + 0.5, [shown(name, most=24) for name in figure.rows])
    _thin(axes, rows, columns)
    if max((len(name) for name in figure.columns), default=0) * columns > 12 * columns * side:
        axes.tick_params(axis="x", rotation=45)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if rows * columns <= _MOST_NUMBERS:
        _write_numbers(axes, values, mesh)
    bar = drawing.colorbar(mesh, ax=axes, shrink=0.85, aspect=18, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, color=RULE, labelcolor=INK)
    bar.set_label(shown(figure.unit, most=40))
    return drawing


def _scale(figure: Heat, values: Any) -> tuple[str, float, float]:
    """Colours and their ends; a diverging scale has zero in its middle."""
    low, high = (float(values.min()), float(values.max())) if values.count() else (0.0, 1.0)
    if figure.diverging:
        most = max(abs(low), abs(high)) or 1.0
        return "RdBu_r", -most, most
    if low >= 0 and high <= 1:
        low, high = (0.0, 1.0) if low < 0.5 else (low, 1.0)
    return "cividis", low, high if high > low else low + 1.0


def _thin(axes: Any, rows: int, columns: int) -> None:
    """Of very many names only some are drawn."""
    for axis, count, most in ((axes.xaxis, columns, 40), (axes.yaxis, rows, 40)):
        if count > most:
            step = -(-count // most)
            places, labels = axis.get_ticklocs(), [label.get_text() for label in axis.get_ticklabels()]
            axis.set_ticks(places[::step], labels[::step])


def _write_numbers(axes: Any, values: Any, mesh: Any) -> None:
    for (row, column), value in np.ndenumerate(values):
        if values.mask is not np.ma.nomask and values.mask[row, column]:
            continue
        red, green, blue, _ = mesh.cmap(mesh.norm(value))
        light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        colour = "#000000" if light > 0.45 else "#fffffe"
        axes.text(column + 0.5, row + 0.5, _number(float(value)), ha="center", va="center", fontsize=6.5, color=colour)


def _number(value: float) -> str:
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return text.removeprefix("-") if float(text) == 0 else text
