"""Diagnosis of a merge: a verdict in words, numbers and figures; one JSON file of a run folder.

Figures are plain data: captions, names and numbers, which `reporting` draws and writes as CSV. `key` names a figure's
files: lower-case letters, digits and dashes, unique within a diagnosis. Missing values are NaN. Texts, labels and names
are untrusted: they are never used as markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build
from orthomerge.evaluation.records import read_document, write_document

FILE = "diagnosis.json"


@dataclass(frozen=True)
class Curve:
    """y over x; `low` and `high`: the edges of a band."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _Figure:
    key: str
    title: str
    caption: str


@dataclass(frozen=True)
class Lines(_Figure):
    """Curves over one axis: histograms, sensitivity, accuracy by shots, losses."""

    x: str
    y: str
    curves: tuple[Curve, ...]
    log_x: bool = False


@dataclass(frozen=True)
class Heat(_Figure):
    """One number per row and column: CKA, cosines, coefficients by layer. `diverging`: colours are centred at zero."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    unit: str
    diverging: bool = False


@dataclass(frozen=True)
class Series:
    name: str
    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Bars(_Figure):
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
class Points(_Figure):
    """t-SNE of one task's inputs: expert, merged, aligned. `true`: class numbers, -1 where unknown.

    `texts` or `images` (PNG as a data URI) show the inputs; at most one of them is not empty.
    """

    task: str
    classes: tuple[str, ...]
    true: tuple[int, ...]
    views: tuple[View, ...]
    texts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


Figure = Lines | Heat | Bars | Points
_KINDS: Mapping[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Figure)}


@dataclass(frozen=True)
class Finding:
    """One or two sentences with their numbers. `title`: a few words."""

    title: str
    text: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of the merge `method`. `facts`: inputs, split, seed, aligner, subsamples."""

    method: str
    tasks: tuple[str, ...]
    verdict: tuple[Finding, ...]
    figures: tuple[Figure, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def write_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """Replace a diagnosis file. JSON has no NaN: a missing number is null."""
    document = asdict(diagnosis)
    for figure, plain in zip(diagnosis.figures, document["figures"], strict=True):
        plain["kind"] = type(figure).__name__.lower()
    write_document(path, _plain(document), indent=None)


def read_diagnosis(path: Path) -> Diagnosis:
    document = read_document(path, error=RecipeError)
    if not isinstance(document, dict) or not isinstance(document.get("figures"), list):
        raise RecipeError(f"{path} is not a diagnosis: it must have a list of 'figures'; diagnose again")
    figures = []
    for number, plain in enumerate(document.pop("figures")):
        kind = _KINDS.get(plain.pop("kind", "")) if isinstance(plain, dict) else None
        if kind is None:
            raise RecipeError(f"{path}: figure {number} must have a 'kind' of {', '.join(_KINDS)}; diagnose again")
        figures.append(build(kind, _numbers(plain), where=f"{path}: figure {number}"))
    return build(Diagnosis, {**document, "figures": tuple(figures)}, where=str(path))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Any:
    """Turn null inside a list of numbers into NaN."""
    if isinstance(value, Mapping):
        return {name: _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [math.nan if inner is None else _numbers(inner) for inner in value]
    return value


def figure_key(prefix: str, name: str, *, among: Sequence[str]) -> str:
    """Return the key `prefix-name`, with a number if several names `among` would have the same."""
    slug = _slug(name)
    if slug and sum(_slug(other) == slug for other in among) < 2:
        return f"{prefix}-{slug}"
    return f"{prefix}-{slug or 'task'}-{list(among).index(name) + 1}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
