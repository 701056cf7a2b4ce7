"""Figures as plain data: captions, names and numbers, which `reporting` draws and writes as CSV.

`key` names its files: lower-case letters, digits and dashes, unique within a diagnosis. Missing values are NaN.
Texts, labels and names are untrusted: they are never used as markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """y over x; `low` and `high`: the edges of a band."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Lines:
    """Curves over one axis: densities, sensitivity, accuracy by shots, losses."""

    key: str
    title: str
    caption: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    log_x: bool = False


@dataclass(frozen=True)
class Heat:
    """One number per row and column: CKA, cosines, coefficients by layer. `diverging`: colours are centred at zero."""

    key: str
    title: str
    caption: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    unit: str
    diverging: bool = False


@dataclass(frozen=True)
class Series:
    """One value per group of `Bars`, with intervals if known."""

    name: str
    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Bars:
    """Groups side by side: accuracy by task under each family of maps, norms by layer."""

    key: str
    title: str
    caption: str
    groups: tuple[str, ...]
    unit: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class View:
    """Features of one encoder in the plane. `predicted`: class numbers, -1 for none."""

    name: str
    title: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    predicted: tuple[int, ...]


@dataclass(frozen=True)
class Points:
    """t-SNE of one task's inputs: expert, merged, aligned. `true`: class numbers, -1 where unknown.

    `texts` or `images` (PNG as a data URI) show the inputs; at most one of them is not empty.
    """

    key: str
    title: str
    caption: str
    task: str
    classes: tuple[str, ...]
    true: tuple[int, ...]
    views: tuple[View, ...]
    texts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


Figure = Lines | Heat | Bars | Points


def figure_key(prefix: str, name: str, *, among: Sequence[str]) -> str:
    """Return the key `prefix-name`, with a number if several names `among` would have the same."""
    slug = _slug(name)
    if slug and sum(_slug(other) == slug for other in among) < 2:
        return f"{prefix}-{slug}"
    return f"{prefix}-{slug or 'task'}-{list(among).index(name) + 1}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
