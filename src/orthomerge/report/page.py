"""One HTML file that holds everything: styles, script, tables, figures and files to download.

The page makes no request, and its policy forbids them. Every text goes through the template's escaping; what is marked
as safe here was written by this package (styles, script, drawings made of known elements alone).
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
from orthomerge.core.table import Table
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
    memory = material.info.memory if material.info else None
    context = {
        "title": title,
        "version": VERSION,
        "policy": _policy(style, head, script),
        "style": _safe(style),
        "head": _safe(head),
        "script": _safe(script),
        "story": summary,
        "diagnosis": material.diagnosis,
        "notes": material.notes,
        "boards": boards,
        "comparisons": _shown(comparison_tables(material.comparisons)),
        "gallery": [plate for plate in shown_plates if plate["kind"] != "points"],
        "static_points": [plate for plate in shown_plates if plate["kind"] == "points"],
        "points": _safe(json_block(points_payload(points))) if points else None,
        "merged": _shown(merged_tables(material)),
        "absent": material.absent,
        "info": material.info,
        "memory": size_of(memory) if memory else "",
        "versions": material.versions,
        "files": {name: _data_uri(text) for name, text in files.items()},
        "suite": material.suite,
        "records": len(material.records),
        "floor": _floor(boards),
        "best": next(((board, row) for board in boards for row in board.rows if row.best), None),
    }
    return str(_environment().get_template("page.html").render(context))


def encoded(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which JSON can hold, becomes a question mark."""
    return text.encode("utf-8", errors="replace")


def _shown(tables: Sequence[Table]) -> list[tuple[Table, Any]]:
    """Tables with their HTML."""
    return [(table, _safe(table.html())) for table in tables]


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
        "svg": _safe(inline_svg(plate.drawn.text_svg, prefix=prefix, label=label)),
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
    pieces = [Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)]
    return Markup("").join(pieces)


def _day(text: str) -> str:
    """An ISO time as a person writes it; any other text stays as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment:%-d %B %Y, %H:%M}{' UTC' if moment.utcoffset() == timedelta(0) else ''}"


def _safe(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - styles, script and drawings of ours, JSON with its brackets escaped


def _asset(name: str) -> str:
    return (resources.files("orthomerge.report") / "templates" / name).read_text(encoding="utf-8").strip()


def _policy(style: str, *scripts: str) -> str:
    return (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _data_uri(text: str, *, kind: str = "text/plain") -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(encoded(text)).decode()}"
