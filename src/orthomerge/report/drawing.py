"""Figures drawn by matplotlib: SVG and PNG in the size of a paper, and an SVG that is part of a page.

Nothing global is changed for good, and the same figure gives the same bytes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orthomerge.analysis.figures import Bars, Figure, Heat, Lines
from orthomerge.core.errors import RecipeError
from orthomerge.report.drawings.bars import draw_bars
from orthomerge.report.drawings.heat import draw_heat
from orthomerge.report.drawings.lines import draw_lines
from orthomerge.report.drawings.points import draw_points
from orthomerge.report.drawings.style import COLUMN, RC

DPI = 200


@dataclass(frozen=True)
class Drawn:
    """`svg`: letters as paths, so that it looks the same everywhere. `text_svg`: letters as text, for a page.

    `wide`: it takes the width of a page, not of a column.
    """

    svg: str
    png: bytes
    text_svg: str
    wide: bool


def draw(figure: Figure) -> Drawn:
    """All forms of one figure."""
    with _style(figure.key):
        drawing = _made(figure)
        svg = _saved(drawing, "svg", fonts="path").decode()
        png = _saved(drawing, "png")
        text_svg = _saved(drawing, "svg", fonts="none").decode()
    return Drawn(svg, png, text_svg, wide=drawing.get_figwidth() > 1.4 * COLUMN)


def _made(figure: Figure) -> Any:
    if isinstance(figure, Lines):
        return draw_lines(figure)
    if isinstance(figure, Heat):
        return draw_heat(figure)
    return draw_bars(figure) if isinstance(figure, Bars) else draw_points(figure)


def _saved(drawing: Any, form: str, *, fonts: str = "path") -> bytes:
    import matplotlib as mpl

    out = io.BytesIO()
    nothing = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    with mpl.rc_context({"svg.fonttype": fonts}):
        drawing.savefig(out, format=form, dpi=DPI, metadata=nothing)
    return out.getvalue()


@contextmanager
def _style(salt: str) -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise RecipeError("figures need matplotlib; pip install 'orthomerge[report]'") from error
    settings: Any = {**RC, "svg.hashsalt": salt}
    with warnings.catch_warnings(), mpl.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield
