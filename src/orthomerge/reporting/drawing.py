"""Draw figures with matplotlib: SVG and PNG in the size of a paper, and an SVG that is part of a page.

No global setting of matplotlib is changed, and the same figure gives the same bytes. INK, SOFT, RULE and PAPER are
roles, which have other colours on a dark page. The colours of series are Okabe and Ito's (2008), which can be told
apart with any kind of colour vision.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orthomerge.analysis.diagnosis import Bars, Figure, Heat, Lines, Points
from orthomerge.core.errors import RecipeError
from orthomerge.core.table import plain

INK, SOFT, RULE, PAPER = "#1f2328", "#636b74", "#dfe2e6", "#ffffff"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7f7f7f", "#9467bd", "#999933")
STROKES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (6, 1.4, 1.4, 1.4)))
UNKNOWN = "#8c959f"  # colour of points without a known class
_LONGEST = 28

_TICKS = {"color": SOFT, "labelcolor": INK, "labelsize": 7.5, "major.width": 0.7, "major.size": 3.0}
RC: Mapping[str, Any] = {
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in _TICKS.items()},
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so it is always available
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,  # a label with two dollar signs is no formula
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "path.simplify": False,
}

COLUMN, WIDE = 3.6, 7.2  # inches: one column, or the width of a page
_DPI = 200
_FEW = 12  # largest number of values on an axis that are all marked and named
_FILLED = 0.8  # share of a group's width that its bars fill
_CELL = 0.31  # inches per side
_MOST_NUMBERS = 160  # largest number of cells with numbers in them
_MOST_NAMES = 40  # along one side of a heat map


@dataclass(frozen=True)
class DrawnFigure:
    """A figure and its drawings. `svg`: letters as paths, independent of fonts; `text_svg`: letters as text, for pages.

    `wide`: whether it takes the width of a page, not of a column.
    """

    figure: Figure
    svg: str
    png: bytes
    text_svg: str
    wide: bool


def draw(figure: Figure) -> DrawnFigure:
    try:
        from matplotlib import style
    except ImportError as error:
        raise RecipeError("figures need matplotlib; pip install 'orthomerge[report]'") from error
    settings: Any = {**RC, "svg.hashsalt": figure.key}
    with warnings.catch_warnings(), style.context(["default", settings]):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        drawing = _DRAW[type(figure)](figure)
        svg, png, text_svg = (_saved(drawing, *form) for form in (("svg", "path"), ("png", "path"), ("svg", "none")))
    return DrawnFigure(figure, svg.decode(), png, text_svg.decode(), wide=drawing.get_figwidth() > 1.4 * COLUMN)


def _saved(drawing: Any, form: str, fonts: str) -> bytes:
    from matplotlib import rcParams

    out = io.BytesIO()
    rcParams["svg.fonttype"] = fonts
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    drawing.savefig(out, format=form, dpi=_DPI, metadata=metadata)
    return out.getvalue()


def _lines(figure: Lines) -> Any:
    drawing, axes = _framed(COLUMN, 2.5)
    many = len(figure.curves) > 5
    for number, curve in enumerate(figure.curves):
        colour = SERIES[number % len(SERIES)]
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
        axes.plot(
            curve.x,
            curve.y,
            label=shown(curve.name),
            color=colour,
            linewidth=1.2 if many and number else 1.7,
            linestyle=STROKES[number // 2 % len(STROKES)] if many else "-",
            marker="o" if len(curve.x) <= _FEW and not many else None,
            markersize=3.4,
        )
    places = sorted({x for curve in figure.curves for x in curve.x if np.isfinite(x)})
    if figure.log_x and all(x > 0 for x in places):
        axes.set_xscale("log")
        if 1 < len(places) <= _FEW:  # not as powers of ten
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.set_xticks([], minor=True)
    axes.set_xlabel(shown(figure.x, most=60))
    axes.set_ylabel(shown(figure.y, most=40))
    axes.margins(x=0.02)
    if len(figure.curves) > 1:
        _legend(drawing, [curve.name for curve in figure.curves])
    return drawing


def _bars(figure: Bars) -> Any:
    count = max(len(figure.series), 1)
    width = COLUMN if len(figure.groups) * count <= 12 else WIDE
    drawing, axes = _framed(width, 2.5 if width == COLUMN else 2.7)
    places = np.arange(len(figure.groups), dtype=np.float64)
    step = _FILLED / count
    for number, series in enumerate(figure.series):
        values, colour = np.asarray(series.values, dtype=np.float64), SERIES[number % len(SERIES)]
        at = places - _FILLED / 2 + step * (number + 0.5)
        axes.bar(at, values, width=0.9 * step, color=colour, linewidth=0, label=shown(series.name))
        if series.low is not None and series.high is not None:
            ends = np.asarray([values - np.asarray(series.low), np.asarray(series.high) - values])
            kept = np.isfinite(ends).all(axis=0)
            lengths = np.maximum(ends[:, kept], 0)
            axes.errorbar(at[kept], values[kept], yerr=lengths, fmt="none", ecolor=SOFT, elinewidth=0.8)
    names = [shown(group, most=18) for group in figure.groups]
    crowded = len(names) * max(map(len, names), default=0) > 12 * width
    axes.set_xticks(places, names, rotation=35 if crowded else 0, ha="right" if crowded else "center")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(shown(figure.unit, most=40))
    axes.set_xlim(-0.6, len(figure.groups) - 0.4)
    if len(figure.series) > 1:
        _legend(drawing, [series.name for series in figure.series])
    return drawing


def _heat(figure: Heat) -> Any:
    """Draw one cell per row and column, with its number while there is room; missing values stay empty."""
    values = np.ma.masked_invalid(np.asarray(figure.values, dtype=np.float64).reshape(len(figure.rows), -1))
    rows, columns = values.shape
    side = min(_CELL, (WIDE - 1.8) / max(columns, 1), 6.5 / max(rows, 1))
    drawing = _canvas(min(max(columns * side + 1.6, COLUMN), WIDE), min(max(rows * side + 1.0, 2.2), 8.5))
    axes = drawing.add_subplot()
    colours, low, high = _heat_scale(figure, values)
    mesh = axes.pcolormesh(values, cmap=colours, vmin=low, vmax=high, edgecolors="face", linewidth=0.3)
    axes.invert_yaxis()
    for set_ticks, names, most in ((axes.set_xticks, figure.columns, 20), (axes.set_yticks, figure.rows, 24)):
        step = -(-len(names) // _MOST_NAMES) or 1
        set_ticks(np.arange(0, len(names), step) + 0.5, [shown(name, most=most) for name in names[::step]])
    if max(map(len, figure.columns), default=0) > 12 * side:
        axes.tick_params(axis="x", rotation=45)
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if rows * columns <= _MOST_NUMBERS:
        _write_numbers(axes, values, mesh)
    bar = drawing.colorbar(mesh, ax=axes, shrink=0.85, aspect=18, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, color=RULE, labelcolor=INK)
    bar.set_label(shown(figure.unit, most=40))
    return drawing


def _heat_scale(figure: Heat, values: Any) -> tuple[str, float, float]:
    """Choose the colour map and its limits; zero is in the middle of a diverging one."""
    low, high = (float(values.min()), float(values.max())) if values.count() else (0.0, 1.0)
    if figure.diverging:
        most = max(abs(low), abs(high)) or 1.0
        return "RdBu_r", -most, most
    if low >= 0 and high <= 1:
        low, high = (0.0, 1.0) if low < 0.5 else (low, 1.0)
    return "cividis", low, high if high > low else low + 1.0


def _write_numbers(axes: Any, values: Any, mesh: Any) -> None:
    for row, column in np.argwhere(~np.ma.getmaskarray(values)):
        value = float(values[row, column])
        red, green, blue, _ = mesh.cmap(mesh.norm(value))
        colour = "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "#fffffe"
        text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
        text = text.removeprefix("-") if float(text) == 0 else text
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=6.5, color=colour)


def _points(figure: Points) -> Any:
    """Draw one panel per view, with full points for inputs that are classified correctly and hollow ones for others.

    The panels share their axes, so that movements of points can be compared.
    """
    from matplotlib.lines import Line2D

    count = max(len(figure.views), 1)
    colours = [*class_colours(len(figure.classes)), UNKNOWN]
    true = np.asarray(figure.true, dtype=np.int64)
    place = np.where((true >= 0) & (true < len(figure.classes)), true, len(figure.classes))
    drawing = _canvas(WIDE if count > 1 else WIDE / 2, WIDE / max(count, 2) + 0.7)
    panels = drawing.subplots(1, count, sharex=True, sharey=True, squeeze=False)[0]
    for axes, view in zip(panels, figure.views, strict=False):
        predicted = np.asarray(view.predicted, dtype=np.int64)
        wrong = (predicted >= 0) & (true >= 0) & (predicted != true)
        x, y = np.asarray(view.x), np.asarray(view.y)
        for number, colour in enumerate(colours):
            chosen = place == number
            axes.plot(
                x[chosen & ~wrong], y[chosen & ~wrong], "o", color=colour, markersize=3, markeredgewidth=0, alpha=0.85
            )
            axes.plot(
                x[chosen & wrong], y[chosen & wrong], "o", mfc="none", mec=colour, markersize=2.8, markeredgewidth=0.8
            )
        axes.set_title(shown(view.title or view.name, most=44))
        axes.set(xticks=[], yticks=[], box_aspect=1)
        axes.spines[:].set_color(RULE)
    if 0 < len(figure.classes) <= len(SERIES):
        handles = [Line2D([], [], marker="o", linestyle="", markersize=4, color=colour) for colour in colours[:-1]]
        _legend(drawing, figure.classes, handles=handles, labels=list(map(shown, figure.classes)))
    return drawing


_DRAW: Mapping[type[Any], Callable[[Any], Any]] = {Lines: _lines, Heat: _heat, Bars: _bars, Points: _points}


def _canvas(width: float, height: float) -> Any:
    from matplotlib.figure import Figure as Drawing

    return Drawing(figsize=(width, height), layout="constrained")


def _framed(width: float, height: float) -> tuple[Any, Any]:
    drawing = _canvas(width, height)
    axes = drawing.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y")
    return drawing, axes


def _legend(drawing: Any, names: Sequence[str], **keys: Any) -> None:
    """Add a legend above the drawing. `keys`: its handles and labels, if not those that were drawn."""
    widest = max(len(shown(name)) for name in names) + 6  # letters; each key takes six
    drawing.legend(
        **keys,
        loc="outside upper left",
        ncols=max(1, min(len(names), int(16 * drawing.get_figwidth() / widest))),
        handlelength=1.8,
        columnspacing=1.4,
        borderaxespad=0.2,
    )


def shown(label: str, *, most: int = _LONGEST) -> str:
    """Shorten a label to one line; matplotlib would hide it if it were empty or began with an underscore."""
    text = cut(plain(label), most)
    return f"\u200a{text}" if text[:1] in ("", "_") else text


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def class_colours(count: int) -> list[str]:
    """Choose colours of classes: by hue up to ten, by shade beyond."""
    if count <= len(SERIES):
        return list(SERIES[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.08 + 0.84 * place / (count - 1))) for place in range(count)]
