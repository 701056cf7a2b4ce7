"""The table of protocols, written by hand: name, maker, title, reference, what evidence it needs.

Third parties add rows through the entry-point group `orthomerge.protocols`; each entry loads a `Row`. The joint label
space is no row: it is a way to score any of these (`joint.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from orthomerge.core.rows import find_row, made, with_plugins
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.evidence import Builder, Need


@dataclass(frozen=True)
class Row:
    """One protocol. `maker`: `module:Class` of a builder or an aligner, imported when first used; `needs` repeats what
    the class declares.
    """

    name: str
    maker: str
    title: str
    reference: str
    needs: frozenset[Need] = frozenset()


_RETHINK = "Rethink the Evaluation Protocol of Model Merging on Classification Task (FT-Classifier)"
_ALAIN = "Alain and Bengio 2016, arXiv 1610.01644"
_HERE = "orthomerge.evaluation"
_LABELLED: frozenset[Need] = frozenset({"features", "labels"})

_ROWS = (
    Row("current", f"{_HERE}.aligned:Current", "The expert's head as it is", f"{_RETHINK}, Current Eval"),
    Row("knn", f"{_HERE}.knn:Knn", "Smallest mean distance to a class", f"{_RETHINK}, Eq. 5", _LABELLED),
    Row(
        "aligned-c",
        "orthomerge.alignment.aligned_c:AlignedC",
        "The expert's head, fitted to the expert's outputs",
        f"{_RETHINK}, Eq. 8; MOMA, Eq. 12",
        Aligned.needs,
    ),
    Row("probe", f"{_HERE}.probe:Probe", "Linear probe: the ceiling", _ALAIN, _LABELLED),
)
PROTOCOLS: Mapping[str, Row] = {row.name: row for row in _ROWS}


@cache
def protocols() -> Mapping[str, Row]:
    """Our rows, then those of installed plug-ins."""
    return with_plugins(PROTOCOLS, Row, group="orthomerge.protocols")


def find_protocol(name: str) -> Row:
    """The row of a protocol; an unknown name offers the nearest."""
    return find_row(protocols(), name, what="protocol")


def make_protocol(name: str, options: Mapping[str, Any] | None = None) -> Builder:
    """A protocol from its name and options; an aligner becomes one."""
    builder = made(find_protocol(name), options or {}, what="protocol")
    return Aligned(builder) if hasattr(builder, "fit") else cast("Builder", builder)
