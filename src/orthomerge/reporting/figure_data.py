"""Convert figures to CSV (unrounded), to points that the page's script draws, and to an SVG inside the page.

An SVG of matplotlib keeps only the elements and attributes listed here, so that labels cannot contain markup. It has no
styles and no ids that clash; colours that are roles (ink, rules, paper) become classes, which the page's style sheet
defines for light and dark.
"""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orthomerge.analysis.diagnosis import Bars, Curve, Figure, Heat, Points, Series
from orthomerge.core.table import Value, csv_text, plain
from orthomerge.reporting.drawing import INK, PAPER, RULE, SOFT, class_colours

_STEPS = 4000  # integer coordinates along the longer side of a frame
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")

_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_HREF = f"{_XLINK}href"
_DRAWN = frozenset(("svg", "g", "path", "use", "defs", "clipPath", "rect", "line", "circle", "text", "tspan", "image"))
_PLACES = frozenset(("x", "y", "width", "height", "d", "cx", "cy", "r"))
_LOOKS = frozenset(
    ("fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset", "stroke-linecap", "stroke-linejoin",
     "opacity", "fill-opacity", "stroke-opacity", "text-anchor", "font-size", "fill-rule", "transform")
)  # fmt: skip
_ROLES: Mapping[str, str] = {INK: "ink", SOFT: "soft", RULE: "rule", PAPER: "paper"}
_SCALE = 1.9  # largest number of pixels per point
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def figure_csv(figure: Figure) -> str:
    rows: Iterable[Sequence[Value]]
    if isinstance(figure, Points):
        return _points_csv(figure)
    if isinstance(figure, Heat):
        head = ["", *figure.columns]
        rows = ([name, *values] for name, values in zip(figure.rows, figure.values, strict=True))
    elif isinstance(figure, Bars):
        head = ["group", "series", "value", "low", "high"]
        bars = ((item.name, _with_band(figure.groups, item.values, item)) for item in figure.series)
        rows = ([group, name, *numbers] for name, band in bars for group, *numbers in band)
    else:
        head = ["curve", "x", "y", "low", "high"]
        rows = ([item.name, *numbers] for item in figure.curves for numbers in _with_band(item.x, item.y, item))
    return csv_text(head, rows)


def _with_band(places: Sequence[Value], values: Sequence[float], item: Series | Curve) -> Iterator[tuple[Value, ...]]:
    none = [None] * len(values)
    return zip(places, values, item.low or none, item.high or none, strict=True)


def _points_csv(figure: Points) -> str:
    def names(numbers: Sequence[int]) -> list[str]:
        return [figure.classes[number] if 0 <= number < len(figure.classes) else "" for number in numbers]

    columns: dict[str, Sequence[Value]] = {"input": range(len(figure.true)), "true": names(figure.true)}
    for view in figure.views:
        columns |= {f"{view.name} x": view.x, f"{view.name} y": view.y, f"{view.name} predicted": names(view.predicted)}
    if figure.texts:
        columns["text"] = figure.texts
    return csv_text(list(columns), zip(*columns.values(), strict=True))


def json_block(document: Any) -> str:
    """Format JSON for a script element; letters that could end the element are escaped."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def points_payload(figure: Points) -> dict[str, Any]:
    """Convert points for the page's script; coordinates are integers in a frame that all views share."""
    points = [point for view in figure.views for point in zip(view.x, view.y, strict=True)]
    points = [point for point in points if all(map(math.isfinite, point))] or [(0.0, 0.0)]
    (left, right), (bottom, top) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    side = max(right - left, top - bottom) or 1.0

    def placed(values: Sequence[float], start: float, sign: int) -> list[int | None]:
        return [round(_STEPS * sign * (value - start) / side) if math.isfinite(value) else None for value in values]

    return {
        **vars(figure),
        "colours": class_colours(len(figure.classes)),
        "size": [round(_STEPS * length / side) for length in (right - left, top - bottom)],
        "views": [{**vars(view), "x": placed(view.x, left, 1), "y": placed(view.y, top, -1)} for view in figure.views],
        "texts": [plain(text) for text in figure.texts],
        "images": [image if _PNG.fullmatch(image) else "" for image in figure.images],
    }


def inline_svg(svg: str, *, prefix: str, label: str) -> str:
    """Convert an SVG of matplotlib for a page. `prefix`: put before every id. `label`: for screen readers."""
    root = ET.fromstring(svg)  # noqa: S314 - matplotlib has just written it
    view = root.get("viewBox", "0 0 100 100")
    width = f"{_SCALE * float(view.split()[2]):.0f}"
    kept = _kept(root, prefix)
    kept.attrib = {"viewBox": view, "width": width, "role": "img", "aria-label": label, "class": "plot"}
    return ET.tostring(kept, encoding="unicode")


def _kept(element: ET.Element, prefix: str) -> ET.Element:
    name = element.tag.removeprefix(_SVG)
    copy = ET.Element(name, _attributes(element, prefix))
    if name in ("text", "tspan"):
        copy.text = element.text
    inner = [_kept(child, prefix) for child in element if child.tag.removeprefix(_SVG) in _DRAWN]
    copy.extend(child for child in inner if child.tag not in ("g", "defs") or len(child))
    return copy


def _attributes(element: ET.Element, prefix: str) -> dict[str, str]:
    """Return the attributes to keep, with those of `style`; references get the prefix of ids."""
    styles = (part.partition(":") for part in element.get("style", "").split(";"))
    attributes, classes = dict[str, str](), list[str]()
    for name, value in {**element.attrib, **{name.strip(): value.strip() for name, _, value in styles}}.items():
        if name == "id" and not element.tag.endswith("}g"):  # groups have ids that nothing refers to
            attributes[name] = prefix + value
        elif name == "clip-path" or (name == _HREF and value.startswith(("#", "data:image/png;base64,"))):
            attributes[name.removeprefix(_XLINK)] = value.replace("#", f"#{prefix}")
        elif name in ("fill", "stroke") and value.lower() in _ROLES:
            classes.append(f"{name}-{_ROLES[value.lower()]}")
        elif name in _PLACES:
            attributes[name] = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", value)
        elif name in _LOOKS:
            attributes[name] = value.removesuffix("px")
    return {**attributes, "class": " ".join(classes)} if classes else attributes
