"""The numbers behind figures: as CSV, nothing rounded, and as the points that the page's script draws."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from orthomerge.analysis.figures import Bars, Figure, Heat, Points
from orthomerge.core.table import Value, csv_text, plain
from orthomerge.report.style import class_colours, cut

_STEPS = 4000  # places along the longer side of a frame
_LONGEST = 600  # letters of a text
_IMAGES = 4_000_000  # letters of all thumbnails together
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


def figure_csv(figure: Figure) -> str:
    """One row per number; of points one row per input."""
    if isinstance(figure, Heat):
        return csv_text(
            ["", *figure.columns], ([name, *row] for name, row in zip(figure.rows, figure.values, strict=True))
        )
    if isinstance(figure, Points):
        return _points_csv(figure)
    series: list[tuple[Sequence[Value], str, Sequence[float], Sequence[float] | None, Sequence[float] | None]]
    if isinstance(figure, Bars):
        head = ["group", "series", "value", "low", "high"]
        series = [(figure.groups, one.name, one.values, one.low, one.high) for one in figure.series]
    else:
        head = ["curve", "x", "y", "low", "high"]
        series = [(one.x, one.name, one.y, one.low, one.high) for one in figure.curves]
    rows: list[list[Value]] = []
    for places, name, values, low, high in series:
        none = (None,) * len(values)
        for place, *rest in zip(places, values, low or none, high or none, strict=True):
            rows.append([place, name, *rest] if isinstance(figure, Bars) else [name, place, *rest])
    return csv_text(head, rows)


def _points_csv(figure: Points) -> str:
    """Classes by name; an input is identified by its number and, if it has one, its text."""

    def names(numbers: Sequence[int]) -> list[str]:
        return [figure.classes[number] if 0 <= number < len(figure.classes) else "" for number in numbers]

    columns: dict[str, Sequence[Value]] = {"input": range(len(figure.true)), "true": names(figure.true)}
    for view in figure.views:
        columns |= {f"{view.name} x": view.x, f"{view.name} y": view.y, f"{view.name} predicted": names(view.predicted)}
    if figure.texts:
        columns["text"] = figure.texts
    return csv_text(list(columns), zip(*columns.values(), strict=True))


def json_block(document: Any) -> str:
    """JSON that can stand inside a script element, whatever its texts contain."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def points_payload(figures: Sequence[Points]) -> list[dict[str, Any]]:
    """Places are whole numbers in a frame that all views of a figure share."""
    return [_payload(figure, _IMAGES // len(figures)) for figure in figures]


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
        "classes": figure.classes,
        "colours": class_colours(len(figure.classes)),
        "true": figure.true,
        "size": [round(_STEPS * length / side) for length in (right - left, top - bottom)],
        "views": [
            {
                "name": view.name,
                "title": view.title,
                "x": placed(view.x, left, 1),
                "y": placed(view.y, top, -1),
                "predicted": view.predicted,
            }
            for view in figure.views
        ],
        "texts": [cut(plain(text), _LONGEST) for text in figure.texts],
        "images": _images(figure.images, room),
    }


def _images(images: Sequence[str], room: int) -> list[str]:
    """Thumbnails while there is room; what is not a PNG is left empty."""
    kept = []
    for image in images:
        kept.append(image if len(image) <= room and _PNG.fullmatch(image) else "")
        room -= len(kept[-1])
    return kept
