"""The table of aligners, written by hand: name, maker, title, reference.

Third parties add rows through the entry-point group `orthomerge.aligners`; each entry loads a `Row`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from orthomerge.alignment.aligner import Aligner
from orthomerge.core.rows import find_row, instance_of, maker_of, with_plugins
from orthomerge.core.schema import schema


@dataclass(frozen=True)
class Row:
    """One aligner. `maker`: `module:Class`, imported when first used; `extra`: not a head, so that the model grows."""

    name: str
    maker: str
    title: str
    reference: str
    extra: bool = False


_HERE = "orthomerge.alignment"


def _row(name: str, maker: str, title: str, reference: str, **more: bool) -> tuple[str, Row]:
    return name, Row(name, f"{_HERE}.{maker}", title, reference, **more)


_MOMA = "MOMA, arXiv 2412.13526 v3"
_RETHINK = "FT-Classifier, arXiv 2412.13526 v1"

_OURS = "this project"

ALIGNERS: Mapping[str, Row] = dict(
    (
        _row("auto", "auto:Auto", "What the number of inputs calls for, or no change", _OURS),
        _row("ridge", "linear_maps:Ridge", "Least squares to the expert's logits, towards its head", _OURS),
        _row("kl-map", "kl_map:KlMap", "KL to the expert's outputs with a prior at its head", _OURS),
        _row("aligned-c", "aligned_c:AlignedC", "KL to the expert's outputs by Adam", f"{_RETHINK}, Eq. 8"),
        _row("orthogonal", "rigid:Orthogonal", "Procrustes with a prior", f"{_MOMA}, Table 1"),
        _row("similarity", "rigid:Similarity", "Procrustes and one scale", f"{_MOMA}, Table 1"),
        _row("scaling", "linear_maps:Scaling", "A factor for every feature", f"{_MOMA}, Table 1"),
        _row("linear", "linear_maps:Linear", "Any linear map", f"{_MOMA}, Table 1"),
        _row("invertible", "linear_maps:Invertible", "Any invertible linear map", f"{_MOMA}, Table 1"),
        _row("affine", "linear_maps:Affine", "Any affine map", f"{_MOMA}, Table 1"),
        _row("logit-procrustes", "logit_procrustes:LogitProcrustes", "Procrustes where the head looks", _OURS),
        _row("aligned-m", "trained_maps:AlignedM", "A square matrix before the head, by Adam", f"{_RETHINK}, Eq. 7"),
        _row("orth-m", "trained_maps:OrthM", "The same, nearly orthogonal", f"{_RETHINK}, Eq. 9"),
        _row("moma-orthogonal", "trained_maps:MomaOrthogonal", "Orthogonal map by Adam", f"{_MOMA}, Eq. 8"),
        _row("surgery", "surgery:Surgery", "A low-rank module before the head", "arXiv 2402.02705", extra=True),
        _row("probsurgery", "surgery:ProbSurgery", "The same, probabilistic", "Wei et al. 2025", extra=True),
    )
)


@cache
def aligners() -> Mapping[str, Row]:
    """Our rows, then those of installed plug-ins."""
    return with_plugins(ALIGNERS, Row, group="orthomerge.aligners")


def find_aligner(name: str) -> Row:
    """The row of an aligner; an unknown name offers the nearest."""
    return find_row(aligners(), name, what="aligner")


def aligner_class(row: Row) -> type:
    """The dataclass behind a row."""
    return cast("type", maker_of(row))


def make_aligner(name: str, options: Mapping[str, Any] | None = None) -> Aligner:
    """An aligner with its options, strictly checked."""
    return cast("Aligner", instance_of(find_aligner(name), options or {}, what="aligner"))


def chosen_aligner(name: str, options: Mapping[str, Any], *, seed: int) -> Aligner:
    """An aligner with its options; one that draws at random gets the seed, unless its options have one."""
    drawn = {"seed": seed} if "seed" in schema(aligner_class(find_aligner(name))) else {}
    return make_aligner(name, {**drawn, **options})
