"""The numbers behind figures: as CSV, nothing rounded, and as the points that the page's script draws."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from orthomerge.analysis.figures import Bars, Figure, Heat, Lines, Points
from orthomerge.core.table import Value, csv_text, plain
from orthomerge.report.style import class_colours

_STEPS = 4000  # places along the longer side of a frame
_LONGEST = 600  # letters of a text
_IMAGES = 4_000_000  # letters of all thumbnails together
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


def figure_csv(figure: Figure) -> str:
    """One row per number; of points one row per input."""
    rows: list[list[Value]] = []
    if isinstance(figure, Points):
        return _points_csv(figure)
    if isinstance(figure, Heat):
        rows = [[name, *values] for name, values in zip(figure.rows, figure.values, strict=True)]
        return csv_text(["", *figure.columns], rows)
    if isinstance(figure, Bars):
        for series in figure.series:
            none = (None,) * len(series.values)
            numbers = zip(figure.groups, series.values, series.low or none, series.high or none, strict=True)
            rows += [[group, series.name, *rest] for group, *rest in numbers]
        return csv_text(["group", "series", "value", "low", "high"], rows)
    return _lines_csv(figure)


def _lines_csv(figure: Lines) -> str:
    rows: list[list[Value]] = []
    for curve in figure.curves:
        none = (None,) * len(curve.x)
        numbers = zip(curve.x, curve.y, curve.low or none, curve.high or none, strict=True)
        rows += [[curve.name, *point] for point in numbers]
    return csv_text(["curve", "x", "y", "low", "high"], rows)


def _points_csv(figure: Points) -> str:
    """Classes by name; an input is identified by its number and, if it has one, its text."""

    def name(number: int) -> str:
        return figure.classes[number] if 0 <= number < len(figure.classes) else ""

    head, columns = ["input", "true"], [range(len(figure.true)), map(name, figure.true)]
    for view in figure.views:
        head += [f"{view.name} x", f"{view.name} y", f"{view.name} predicted"]
        columns += [view.x, view.y, map(name, view.predicted)]
    if figure.texts:
        head.append("text")
        columns.append(figure.texts)
    return csv_text(head, zip(*columns, strict=True))


def json_block(document: Any) -> str:
    """JSON that can stand inside a script element, whatever its texts contain."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def points_payload(figures: Sequence[Points]) -> list[dict[str, Any]]:
    """Places are whole numbers in a frame that all views of a figure share."""
    room = _IMAGES // max(len(figures), 1)
    return [_payload(figure, room) for figure in figures]


def _payload(figure: Points, room: int) -> dict[str, Any]:
    points = [point for view in figure.views for point in zip(view.x, view.y, strict=True)]
    points = [point for point in points if all(map(math.isfinite, point))] or [(0.0, 0.0)]
    (left, right), (bottom, top) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    side = max(right - left, top - bottom) or 1.0

    def placed(values: Sequence[float], start: float, sign: int) -> list[int | None]:
        return [round(_STEPS * sign * (value - start) / side) if math.isfinite(value) else None for value in values]

    return {
        "key": figure.key,
        "task": figure.task,
        "title": figure.title,
        "caption": figure.caption,
        "classes": list(figure.classes),
        "colours": class_colours(len(figure.classes)),
        "true": list(figure.true),
        "size": [round(_STEPS * length / side) for length in (right - left, top - bottom)],
        "views": [
            {
                "name": view.name,
                "title": view.title,
                "x": placed(view.x, left, 1),
                "y": placed(view.y, top, -1),
                "predicted": list(view.predicted),
            }
            for view in figure.views
        ],
        "texts": [_cut(plain(text)) for text in figure.texts],
        "images": _images(figure.images, room),
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _images(images: Sequence[str], room: int) -> list[str]:
    """Thumbnails while there is room; what is not a PNG is left empty."""
    kept = []
    for image in images:
        kept.append(image if len(image) <= room and _PNG.fullmatch(image) else "")
        room -= len(kept[-1])
    return kept
