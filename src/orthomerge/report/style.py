"""Colours and settings of drawings. INK, SOFT, RULE and PAPER are roles: a dark page gives them other colours.

The series' colours are Okabe and Ito's (2008), which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orthomerge.core.table import plain

INK, SOFT, RULE, PAPER = "#1f2328", "#636b74", "#dfe2e6", "#ffffff"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7f7f7f", "#9467bd", "#999933")
STROKES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (6, 1.4, 1.4, 1.4)))
UNKNOWN = "#8c959f"  # of points without a known class
_LONGEST = 28

RC: Mapping[str, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.7,
    "axes.unicode_minus": True,
    "text.color": INK,
    "text.usetex": False,
    "text.parse_math": False,  # a label with two dollars is no formula
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "path.simplify": False,
}


def shown(label: str, *, most: int = _LONGEST) -> str:
    """A label on one line, not too long, and not one that matplotlib would hide."""
    text = cut(plain(label), most)
    return f"\u200a{text}" if text.startswith("_") else text


def cut(text: str, most: int) -> str:
    """At most N letters of a text."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def class_colours(count: int) -> list[str]:
    """Up to ten classes by hue, more by shade."""
    if count <= len(SERIES):
        return list(SERIES[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.08 + 0.84 * place / (count - 1))) for place in range(count)]
