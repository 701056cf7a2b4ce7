"""Interface of aligners, and the hand-written table of them.

An aligner compares features of the same unlabelled inputs from two encoders and returns a classifier. A `Head` replaces
the expert's; other classifiers have extra parameters, which are counted and stored beside the model.

Third parties add rows by the entry-point group `orthomerge.aligners` (`orthomerge.testing.check_aligner` checks them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from orthomerge.core.schema import TableRow, find_row, instance_of, maker_of, schema, with_plugins

if TYPE_CHECKING:
    from orthomerge.models.features import FeaturePair
    from orthomerge.models.heads import Classifier, Head


Fact = float | int | str | bool


@dataclass(frozen=True)
class Alignment:
    """A classifier for merged features, and facts about it, such as a strength or a defect."""

    classifier: Classifier
    facts: Mapping[str, Fact] = field(default_factory=dict)


class Aligner(Protocol):
    """An object whose fields are its options; `fit` must not change `head`, which is the expert's."""

    def fit(self, pair: FeaturePair, head: Head) -> Alignment: ...


@dataclass(frozen=True)
class Row(TableRow):
    """One aligner. `maker`: `module:Class`, imported when first used; `extra`: not a head, so that the model grows.

    For the contracts of `orthomerge.testing`. `quick`: options that make them fast. `careful`: whether an expert that
    the merge left unchanged keeps its head to the last bit.
    """

    extra: bool = False
    careful: bool = False
    quick: Mapping[str, Any] = field(default_factory=dict)


_MOMA = "MOMA, arXiv 2412.13526 v3"
_RETHINK = "FT-Classifier, arXiv 2412.13526 v1"
_OURS = "this project"
_CLOSED: Mapping[str, Any] = {"careful": True}
_STEPS: Mapping[str, Any] = {"quick": {"steps": 10}}
_STRONG: Mapping[str, Any] = {"quick": {"strength": 0.1}}
_EPOCHS: Mapping[str, Any] = {"quick": {"epochs": 2}}

# Name, maker, title, reference, and what differs from the defaults of a row.
_ROWS: tuple[tuple[str, str, str, str, Mapping[str, Any]], ...] = (
    ("auto", "auto:Auto", "What the number of inputs calls for, or no change", _OURS, _CLOSED),
    ("ridge", "linear_maps:Ridge", "Least squares to the expert's logits, towards its head", _OURS, _CLOSED),
    ("kl-map", "kl_map:KlMap", "KL to the expert's outputs with a prior at its head", _OURS, {**_CLOSED, **_STRONG}),
    ("aligned-c", "aligned_c:AlignedC", "KL to the expert's outputs by Adam", f"{_RETHINK}, Eq. 8", _EPOCHS),
    ("orthogonal", "rigid:Orthogonal", "Procrustes with a prior", f"{_MOMA}, Table 1", _CLOSED),
    ("similarity", "rigid:Similarity", "Procrustes and one scale", f"{_MOMA}, Table 1", _CLOSED),
    ("scaling", "linear_maps:Scaling", "A factor for every feature", f"{_MOMA}, Table 1", _CLOSED),
    ("linear", "linear_maps:Linear", "Any linear map", f"{_MOMA}, Table 1", _CLOSED),
    ("invertible", "linear_maps:Invertible", "Any invertible linear map", f"{_MOMA}, Table 1", _CLOSED),
    ("affine", "linear_maps:Affine", "Any affine map", f"{_MOMA}, Table 1", _CLOSED),
    ("logit-procrustes", "logit_procrustes:LogitProcrustes", "Procrustes where the head looks", _OURS, _CLOSED),
    ("aligned-m", "trained_maps:AlignedM", "A square matrix before the head, by Adam", f"{_RETHINK}, Eq. 7", _STEPS),
    ("orth-m", "trained_maps:OrthM", "The same, nearly orthogonal", f"{_RETHINK}, Eq. 9", _STEPS),
    ("moma-orthogonal", "trained_maps:MomaOrthogonal", "Orthogonal map by Adam", f"{_MOMA}, Eq. 8", _STEPS),
    ("surgery", "surgery:Surgery", "A low-rank module before the head", "arXiv 2402.02705", {"extra": True, **_STEPS}),
    ("probsurgery", "surgery:ProbSurgery", "The same, probabilistic", "Wei et al. 2025", {"extra": True, **_STEPS}),
)
ALIGNERS: Mapping[str, Row] = {
    name: Row(name, f"orthomerge.alignment.{maker}", title, reference, **more)
    for name, maker, title, reference, more in _ROWS
}


@cache
def aligners() -> Mapping[str, Row]:
    return with_plugins(ALIGNERS, Row, group="orthomerge.aligners")


def find_aligner(name: str) -> Row:
    """Return the row of an aligner. Plug-ins, which take time to find, are searched last."""
    return ALIGNERS.get(name) or find_row(aligners(), name, what="aligner")


def make_aligner(name: str, options: Mapping[str, Any] | None = None) -> Aligner:
    return cast("Aligner", instance_of(find_aligner(name), options or {}, what="aligner"))


def chosen_aligner(name: str, options: Mapping[str, Any], *, seed: int) -> Aligner:
    """Build an aligner; if it has a seed that `options` do not set, it is `seed`."""
    default = {"seed": seed} if "seed" in schema(maker_of(find_aligner(name))) else {}
    return make_aligner(name, {**default, **options})
