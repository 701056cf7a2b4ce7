"""Curves over one axis, with their bands."""

from __future__ import annotations

from typing import Any

import numpy as np

from orthomerge.analysis.figures import Lines
from orthomerge.report.drawings.style import COLUMN, SERIES, STROKES, finish, legend_above, shown

_FEW = 12  # so few that each is marked


def draw_lines(figure: Lines) -> Any:
    """A curve is known by colour and by stroke."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(COLUMN, 2.5), layout="constrained")
    axes = drawing.add_subplot()
    handles, many = [], len(figure.curves) > 5
    for number, curve in enumerate(figure.curves):
        colour = SERIES[number % len(SERIES)]
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
        few = len(curve.x) <= _FEW and not many
        (handle,) = axes.plot(
            curve.x,
            curve.y,
            color=colour,
            linewidth=1.2 if many and number else 1.7,
            linestyle=STROKES[number // 2 % len(STROKES)] if many else "-",
            marker="o" if few else None,
            markersize=3.4,
        )
        handles.append(handle)
    if figure.log_x and all(x > 0 for curve in figure.curves for x in curve.x if np.isfinite(x)):
        axes.set_xscale("log")
        _plain_ticks(axes, figure)
    axes.set_xlabel(shown(figure.x, most=60))
    axes.set_ylabel(shown(figure.y, most=40))
    finish(axes)
    axes.margins(x=0.02)
    if len(figure.curves) > 1:
        legend_above(drawing, handles, [curve.name for curve in figure.curves])
    return drawing


def _plain_ticks(axes: Any, figure: Lines) -> None:
    """Few places are named as they are: 1, 5, 20, and not as powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    places = sorted({x for curve in figure.curves for x in curve.x if np.isfinite(x)})
    if 1 < len(places) <= _FEW:
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
