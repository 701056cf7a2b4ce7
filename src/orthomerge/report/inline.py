"""An SVG of matplotlib as part of an HTML page: no styles, no ids that clash, colours that follow the page.

Only elements that draw are kept, and only the attributes listed here, so a label can be nothing but text. Colours that
are roles (ink, rules, paper) become classes, which the page's style sheet defines for light and dark.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping

from orthomerge.report.style import INK, PAPER, RULE, SOFT

_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_DRAWN = frozenset(("svg", "g", "path", "use", "defs", "clipPath", "rect", "line", "circle", "text", "tspan", "image"))
_PLACES = frozenset(("x", "y", "width", "height", "d", "cx", "cy", "r"))
_LOOKS = frozenset(
    ("fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset", "stroke-linecap", "stroke-linejoin",
     "opacity", "fill-opacity", "stroke-opacity", "text-anchor", "font-size", "font-weight", "fill-rule")
)  # fmt: skip
_ROLES: Mapping[str, str] = {INK: "ink", SOFT: "soft", RULE: "rule", PAPER: "paper"}
_SCALE = 1.9  # pixels per point at most
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def inline_svg(svg: str, *, prefix: str, label: str) -> str:
    """`prefix`: put before every id. `label`: for screen readers."""
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
    attributes: dict[str, str] = {}
    for name, value in element.attrib.items():
        if name == "id" and not element.tag.endswith("}g"):  # groups have ids that nothing refers to
            attributes["id"] = prefix + value
        elif name == f"{_XLINK}href" and value.startswith("#"):
            attributes["href"] = f"#{prefix}{value[1:]}"
        elif name == f"{_XLINK}href":
            attributes |= {"href": value} if value.startswith("data:image/png;base64,") else {}
        elif name == "clip-path":
            attributes[name] = value.replace("url(#", f"url(#{prefix}")
        elif name == "style":
            attributes |= _looks(value)
        elif name in ("transform", "viewBox") or name in _LOOKS:
            attributes[name] = value
        elif name in _PLACES:
            attributes[name] = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", value)
    return _with_roles(attributes)


def _with_roles(attributes: dict[str, str]) -> dict[str, str]:
    classes = []
    for side in ("fill", "stroke"):
        if role := _ROLES.get(attributes.get(side, "").lower()):
            del attributes[side]
            classes.append(f"{side}-{role}")
    return {**attributes, "class": " ".join(classes)} if classes else attributes


def _looks(style: str) -> dict[str, str]:
    attributes: dict[str, str] = {}
    for part in style.split(";"):
        name, _, value = (text.strip() for text in part.partition(":"))
        if name == "font":
            size = re.search(r"([\d.]+)px", value)
            attributes |= {"font-size": size[1]} if size else {}
            attributes |= {"font-weight": "600"} if "bold" in value or re.search(r"\b[67]00\b", value) else {}
        elif name == "font-size":
            attributes[name] = value.removesuffix("px")
        elif name in _LOOKS:
            attributes[name] = value
    return attributes
