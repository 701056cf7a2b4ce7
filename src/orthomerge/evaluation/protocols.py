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
from orthomerge.evaluation.evidence import Builder, Need


@dataclass(frozen=True)
class Row:
    """One protocol. `maker` is `module:Class`, imported when first used; `needs` repeats what the class declares."""

    name: str
    maker: str
    title: str
    reference: str
    needs: frozenset[Need] = frozenset()


def _row(name: str, maker: str, title: str, reference: str, *needs: Need) -> tuple[str, Row]:
    return name, Row(name, f"orthomerge.evaluation.{maker}", title, reference, frozenset(needs))


_RETHINK = "Rethink the Evaluation Protocol of Model Merging on Classification Task (FT-Classifier)"
_ALIGNED = "The expert's head, fitted to the expert's outputs"
_ALAIN = "Alain and Bengio 2016, arXiv 1610.01644"

PROTOCOLS: Mapping[str, Row] = dict(
    (
        _row("current", "aligned:Current", "The expert's head as it is", f"{_RETHINK}, Current Eval"),
        _row("knn", "knn:Knn", "Smallest mean distance to a class", f"{_RETHINK}, Eq. 5", "features", "labels"),
        _row("aligned-c", "aligned:aligned_c", _ALIGNED, f"{_RETHINK}, Eq. 8; MOMA, Eq. 12", "features", "expert"),
        _row("probe", "probe:Probe", "Linear probe: the ceiling", _ALAIN, "features", "labels"),
    )
)


@cache
def protocols() -> Mapping[str, Row]:
    """Our rows, then those of installed plug-ins."""
    return with_plugins(PROTOCOLS, Row, group="orthomerge.protocols")


def find_protocol(name: str) -> Row:
    """The row of a protocol; an unknown name offers the nearest."""
    return find_row(protocols(), name, what="protocol")


def make_protocol(name: str, options: Mapping[str, Any] | None = None) -> Builder:
    """A protocol from its name and options."""
    return cast("Builder", made(find_protocol(name), options or {}, what="protocol"))
