"""Diagnosis of a merge: a verdict in words, numbers and figures; one JSON file of a run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from orthomerge.analysis.figures import Figure
from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build
from orthomerge.evaluation.records import read_document, write_document

FILE = "diagnosis.json"
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
