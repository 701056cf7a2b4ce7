"""One task's inputs in the plane, a panel for each view. Full: read rightly; hollow: wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np

from orthomerge.analysis.figures import Points
from orthomerge.report.drawings.style import RULE, SERIES, WIDE, class_colours, legend_above, shown

_UNKNOWN = "#8c959f"


def draw_points(figure: Points) -> Any:
    """The panels share their axes: where a point moves to is part of what is shown."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    count = max(len(figure.views), 1)
    colours = [*class_colours(len(figure.classes)), _UNKNOWN]
    true = np.asarray(figure.true, dtype=np.int64)
    place = np.where((true >= 0) & (true < len(figure.classes)), true, len(figure.classes))
    drawing = Figure(figsize=(WIDE if count > 1 else WIDE / 2, WIDE / max(count, 2) + 0.7), layout="constrained")
    panels = drawing.subplots(1, count, sharex=True, sharey=True, squeeze=False)[0]
    for axes, view in zip(panels, figure.views, strict=False):
        predicted = np.asarray(view.predicted, dtype=np.int64)
        wrong = (predicted >= 0) & (true >= 0) & (predicted != true)
        x, y = np.asarray(view.x), np.asarray(view.y)
        for number, colour in enumerate(colours):
            own = place == number
            axes.plot(x[own & ~wrong], y[own & ~wrong], "o", color=colour, markersize=3, markeredgewidth=0, alpha=0.85)
            axes.plot(x[own & wrong], y[own & wrong], "o", mfc="none", mec=colour, markersize=2.8, markeredgewidth=0.8)
        axes.set_title(shown(view.title or view.name, most=44))
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_aspect("equal")
        for spine in axes.spines.values():
            spine.set_color(RULE)
    _square(panels[0], figure)
    if 0 < len(figure.classes) <= len(SERIES):
        handles = [Line2D([], [], marker="o", linestyle="", markersize=4, color=colour) for colour in colours[:-1]]
        legend_above(drawing, handles, figure.classes)
    return drawing


def _square(axes: Any, figure: Points) -> None:
    """One square frame around the points of all views."""
    x = np.asarray([value for view in figure.views for value in view.x], dtype=np.float64)
    y = np.asarray([value for view in figure.views for value in view.y], dtype=np.float64)
    kept = np.isfinite(x) & np.isfinite(y)
    if not kept.any():
        return
    middle = [(side[kept].min() + side[kept].max()) / 2 for side in (x, y)]
    half = 0.54 * max(np.ptp(x[kept]), np.ptp(y[kept]), 1e-9)
    axes.set_xlim(middle[0] - half, middle[0] + half)
    axes.set_ylim(middle[1] - half, middle[1] + half)
