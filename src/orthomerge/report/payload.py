"""What the page's script is given: the points of every task, small, and never as markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from orthomerge.analysis.figures import Points
from orthomerge.core.table import plain
from orthomerge.report.style import class_colours

_STEPS = 4000  # places along the longer side
_LONGEST = 600  # letters of a text
_IMAGES = 4_000_000  # letters of all thumbnails together
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


def json_block(document: Any) -> str:
    """JSON that can stand inside a script element, whatever its texts say."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def points_payload(figures: Sequence[Points]) -> list[dict[str, Any]]:
    """Places are whole numbers in a frame that all views of a figure share."""
    room = _IMAGES // max(len(figures), 1)
    return [_one(figure, room) for figure in figures]


def _one(figure: Points, room: int) -> dict[str, Any]:
    everything = [(x, y) for view in figure.views for x, y in zip(view.x, view.y, strict=True)]
    known = [(x, y) for x, y in everything if math.isfinite(x) and math.isfinite(y)] or [(0.0, 0.0)]
    left, top = min(x for x, _ in known), max(y for _, y in known)
    side = max(max(x for x, _ in known) - left, top - min(y for _, y in known)) or 1.0

    def placed(values: Sequence[float], start: float, sign: int) -> list[int | None]:
        return [round(_STEPS * sign * (v - start) / side) if math.isfinite(v) else None for v in values]

    width, height = (round(_STEPS * (max(axis) - min(axis)) / side) for axis in zip(*known, strict=True))
    return {
        "key": figure.key,
        "task": figure.task,
        "title": figure.title,
        "caption": figure.caption,
        "classes": list(figure.classes),
        "colours": class_colours(len(figure.classes)),
        "true": list(figure.true),
        "size": [width, height],
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
        "texts": [_cut(text) for text in figure.texts],
        "images": _images(figure.images, room),
    }


def _cut(text: str) -> str:
    text = plain(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _images(images: Sequence[str], room: int) -> list[str]:
    """Thumbnails while there is room; what is no PNG is nothing."""
    found = []
    for image in images:
        kept = image if len(image) <= room and _PNG.fullmatch(image) else ""
        room -= len(kept)
        found.append(kept)
    return found
