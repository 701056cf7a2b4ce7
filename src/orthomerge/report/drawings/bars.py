"""Groups side by side, with intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from orthomerge.analysis.figures import Bars
from orthomerge.report.drawings.style import COLUMN, SERIES, SOFT, WIDE, finish, legend_above, shown

_SHARE = 0.8  # of a group's width that is filled


def draw_bars(figure: Bars) -> Any:
    """Many bars take the width of a page."""
    from matplotlib.figure import Figure

    count = max(len(figure.series), 1)
    width = COLUMN if len(figure.groups) * count <= 12 else WIDE
    drawing = Figure(figsize=(width, 2.5 if width == COLUMN else 2.7), layout="constrained")
    axes = drawing.add_subplot()
    places = np.arange(len(figure.groups), dtype=np.float64)
    step = _SHARE / count
    handles = []
    for number, series in enumerate(figure.series):
        values = np.asarray(series.values, dtype=np.float64)
        at = places - _SHARE / 2 + step * (number + 0.5)
        handles.append(axes.bar(at, values, width=0.9 * step, color=SERIES[number % len(SERIES)], linewidth=0))
        if series.low is not None and series.high is not None:
            ends = np.asarray([values - np.asarray(series.low), np.asarray(series.high) - values])
            kept = np.isfinite(ends).all(axis=0)
            axes.errorbar(
                at[kept], values[kept], yerr=np.maximum(ends[:, kept], 0), fmt="none", ecolor=SOFT, elinewidth=0.8
            )
    names = [shown(group, most=18) for group in figure.groups]
    crowded = len(names) * max(map(len, names), default=0) > 12 * width
    axes.set_xticks(places, names, rotation=35 if crowded else 0, ha="right" if crowded else "center")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(shown(figure.unit, most=40))
    axes.set_xlim(-0.6, len(figure.groups) - 0.4)
    finish(axes)
    if len(figure.series) > 1:
        legend_above(drawing, handles, [series.name for series in figure.series])
    return drawing
