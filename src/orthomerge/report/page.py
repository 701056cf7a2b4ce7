"""One HTML file that holds everything: styles, script, tables, figures and files to download.

The page makes no request, and its policy forbids them. Every text goes through the templates' escaping; what they mark
as safe was written by this package (styles, script, tables, drawings made of known elements alone, escaped JSON).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any

from orthomerge.analysis.figures import Figure, Points
from orthomerge.core.errors import RecipeError
from orthomerge.core.version import VERSION
from orthomerge.evaluation.comparisons import comparison_tables
from orthomerge.report.drawing import Drawn
from orthomerge.report.facts import listed, merged_tables, numbers_of, size_of, time_of
from orthomerge.report.figure_data import figure_csv, json_block, points_payload
from orthomerge.report.inline import inline_svg
from orthomerge.report.material import Material
from orthomerge.report.story import Story
from orthomerge.report.tables import Board, legend

_SCRIPTS = ("page.js", "tables.js", "points.js")


@dataclass(frozen=True)
class Plate:
    """A figure and its drawings."""

    figure: Figure
    drawn: Drawn


def page(
    material: Material,
    *,
    title: str,
    boards: Sequence[Board],
    summary: Story,
    plates: Sequence[Plate],
    files: Mapping[str, str],
) -> str:
    """`files`: the tables in their forms, by name, to be downloaded from the page."""
    style, head, script = _asset("style.css"), _asset("head.js"), "\n".join(map(_asset, _SCRIPTS))
    shown_plates = [_plate(plate, f"f{number}-") for number, plate in enumerate(plates)]
    points = [plate.figure for plate in plates if isinstance(plate.figure, Points)]
    context = {
        **vars(material),
        "suite": material.suite,
        "versions": material.versions,
        "title": title,
        "version": VERSION,
        "policy": _policy(style, head, script),
        "style": style,
        "head": head,
        "script": script,
        "story": summary,
        "boards": boards,
        "comparisons": comparison_tables(material.comparisons),
        "gallery": [plate for plate in shown_plates if plate["kind"] != "points"],
        "static_points": [plate for plate in shown_plates if plate["kind"] == "points"],
        "points": json_block(points_payload(points)) if points else None,
        "merged": merged_tables(material.manifests),
        "memory": size_of(material.info.memory) if material.info and material.info.memory else "",
        "files": {name: _data_uri(text) for name, text in files.items()},
        "floor": _floor(boards),
        "best": next(((board, row) for board in boards for row in board.rows if row.best), None),
    }
    return str(_environment().get_template("page.html").render(context))


def encoded(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", errors="replace")


def _plate(plate: Plate, prefix: str) -> dict[str, Any]:
    figure = plate.figure
    downloads = {f"{figure.key}.csv": _data_uri(figure_csv(figure), kind="text/csv")}
    if not isinstance(figure, Points):  # thousands of marks: the file beside the page has them
        downloads[f"{figure.key}.svg"] = _data_uri(plate.drawn.svg, kind="image/svg+xml")
    label = f"{figure.title}. {figure.caption}"
    return {
        "key": figure.key,
        "kind": type(figure).__name__.lower(),
        "title": figure.title,
        "caption": figure.caption,
        "wide": plate.drawn.wide,
        "svg": inline_svg(plate.drawn.text_svg, prefix=prefix, label=label),
        "downloads": downloads,
    }


def _floor(boards: Sequence[Board]) -> float:
    """Where the scale of intervals begins: below all rows but those of a joint label space."""
    lows = [row.line.low for board in boards for row in board.rows if row.line.protocol != "joint"]
    return min(90.0, 10 * (min(lows, default=0.0) // 10))


@cache
def _environment() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise RecipeError("a report needs jinja2; pip install 'orthomerge[report]'") from error
    environment = Environment(
        loader=PackageLoader("orthomerge.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(legend=legend)
    environment.filters.update(prose=_prose, listed=listed, numbers=numbers_of, day=_day, time=time_of)
    return environment


def _prose(text: str) -> Any:
    """Escape a text; what stands between backticks is code."""
    from markupsafe import Markup, escape

    parts = text.replace(" %", "\u00a0%").split("`")
    if len(parts) % 2 == 0:
        return escape("`".join(parts))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)
    )


def _day(text: str) -> str:
    """An ISO time as a person writes it; any other text stays as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment:%-d %B %Y, %H:%M}{' UTC' if moment.utcoffset() == timedelta(0) else ''}"


def _asset(name: str) -> str:
    return (resources.files("orthomerge.report") / "templates" / name).read_text(encoding="utf-8").strip()


def _policy(style: str, *scripts: str) -> str:
    """Only these styles and scripts, by their hashes, and pictures that are in the page."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, *scripts)]
    first, *others = (f"'sha256-{digest}'" for digest in hashes)
    sources = f"img-src data:; style-src {first}; script-src {' '.join(others)}"
    return f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"


def _data_uri(text: str, *, kind: str = "text/plain") -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(encoded(text)).decode()}"
