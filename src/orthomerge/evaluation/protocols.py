"""Evaluation protocols: the evidence that each declares, the table of protocols, and a protocol with its options.

A protocol declares the evidence that it needs and receives nothing else, so labels cannot leak into a protocol without
labels. "Current Eval" of FT-Classifier and of MOMA (Eq. 11) uses the expert's head unchanged: logits
g(x; theta_m) W_t^T + b_t. Every aligner is a protocol, too: it is fitted to features of the merged encoder and of the
expert for the same unlabelled inputs, and starts from the expert's head, even if the merged model has another.

Plug-ins add rows through the entry-point group `orthomerge.protocols`; each entry loads a `Row`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, cast, get_args

import torch

from orthomerge.alignment.aligners import Aligner, aligners, find_aligner
from orthomerge.core.checks import at_least_one, not_negative
from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import TableRow, find_row, instance_of, maker_of, with_plugins
from orthomerge.data.task import Access, Split
from orthomerge.evaluation.records import Way, option_texts
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Classifier, Head

# features: of unlabelled support inputs; expert: the expert's features of them, and its head; labels: the true ones.
Need = Literal["features", "expert", "labels"]
Shots = int | float | None  # per class; a share of the split if below 1; None: all of it
_ACCESSES = get_args(Access)  # from the narrowest to the widest


@dataclass(frozen=True)
class Evidence:
    """Support features of model and expert, a seed, and the model's head, or the expert's if the protocol needs it."""

    head: Head
    support: Features | None = None
    expert: Features | None = None
    seed: int = 0

    def labelled(self, protocol: str) -> tuple[Features, torch.Tensor]:
        if self.support is None or self.support.labels is None:
            raise RecipeError(f"{protocol!r} needs labels of its support inputs, got none; use a labelled split")
        return self.support, self.support.labels

    def pair(self) -> FeaturePair:
        if self.support is None or self.expert is None:
            raise RecipeError("an aligner needs features of its support inputs by the model and the expert, got none")
        return FeaturePair(self.support, self.expert)


class Builder(Protocol):
    """Implementation of a protocol: it builds the classifier that is scored; its fields are its options."""

    needs: ClassVar[frozenset[Need]]

    def build(self, evidence: Evidence) -> Classifier: ...


@dataclass(frozen=True)
class Current:
    """The head, unchanged."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    def build(self, evidence: Evidence) -> Head:
        return evidence.head


@dataclass(frozen=True)
class Aligned:
    """The head that an aligner fits; the seed of the evidence replaces the aligner's `seed` if it has one."""

    aligner: Aligner

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "expert"})

    def build(self, evidence: Evidence) -> Classifier:
        aligner: Any = self.aligner
        if hasattr(aligner, "seed"):
            aligner = replace(aligner, seed=evidence.seed)
        classifier: Classifier = aligner.fit(evidence.pair(), evidence.head).classifier
        return classifier


@dataclass(frozen=True)
class Row(TableRow):
    """One protocol. `maker`: `module:Class` of a builder or an aligner, imported when first used."""

    @property
    def needs(self) -> frozenset[Need]:
        needs: frozenset[Need] = getattr(maker_of(self), "needs", Aligned.needs)
        return needs


_RETHINK = "Rethink the Evaluation Protocol of Model Merging on Classification Task (FT-Classifier)"
_ALAIN = "Alain and Bengio 2016, arXiv 1610.01644"
_HERE = "orthomerge.evaluation"
_ROWS = (
    Row("current", f"{_HERE}.protocols:Current", "The expert's head as it is", f"{_RETHINK}, Current Eval"),
    Row("knn", f"{_HERE}.knn:Knn", "Smallest mean distance to a class", f"{_RETHINK}, Eq. 5"),
    Row(
        "aligned-c",
        "orthomerge.alignment.aligned_c:AlignedC",
        "The expert's head, fitted to the expert's outputs",
        f"{_RETHINK}, Eq. 8; MOMA, Eq. 12",
    ),
    Row("probe", f"{_HERE}.probe:Probe", "Linear probe: the ceiling", _ALAIN),
)
PROTOCOLS: Mapping[str, Row] = {row.name: row for row in _ROWS}


@cache
def protocols() -> Mapping[str, Row]:
    return with_plugins(PROTOCOLS, Row, group="orthomerge.protocols")


def find_protocol(name: str) -> Row:
    return find_row(protocols(), name, what="protocol")


@dataclass(frozen=True)
class EvaluationProtocol:
    """A protocol `name`, or else an `aligner`, with its options, support inputs and access.

    `support`: the split of the support inputs under inductive access; transductive access takes them from the test
    split. `seeds`: number of draws of support inputs, with the seeds `first`, `first + 1`, .... `fewer`: whether a
    class with fewer inputs than `shots` is allowed, and used whole. `models`: names of subjects to score; None: all.
    """

    name: str = "current"
    options: Mapping[str, Any] = field(default_factory=dict)
    shots: Shots = None
    seeds: int = 1
    access: Literal["inductive", "transductive"] = "inductive"
    support: Split = "train"
    aligner: str | None = None
    models: tuple[str, ...] | None = None
    fewer: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        at_least_one(seeds=self.seeds)
        not_negative(first=self.first)
        if self.aligner is not None and self.name != "current":
            raise RecipeError(
                f"the protocol must be 'current' with aligner {self.aligner!r}, got {self.name!r}; leave one out"
            )
        if self.access == "inductive" and self.support == "test":
            raise RecipeError(
                "inductive support must come from another split than the scored one, got 'test' for both; "
                "give 'train' or 'val', or the access 'transductive'"
            )

    @classmethod
    def of(cls, named: str | EvaluationProtocol) -> EvaluationProtocol:
        """Return the protocol or aligner of a name with default options; a protocol is returned unchanged."""
        if isinstance(named, EvaluationProtocol):
            return named
        if named not in protocols() and named in aligners():
            return cls(aligner=named)
        return cls(find_protocol(named).name)

    @property
    def needs(self) -> frozenset[Need]:
        return Aligned.needs if self.aligner is not None else find_protocol(self.name).needs

    @property
    def split(self) -> Split:
        return self.support if self.access == "inductive" else "test"

    def builder(self) -> Builder:
        row: TableRow = find_protocol(self.name) if self.aligner is None else find_aligner(self.aligner)
        what = "protocol" if self.aligner is None else "aligner"
        builder = instance_of(row, self.options, what=what)
        if not hasattr(builder, "fit"):
            return cast("Builder", builder)
        if "seed" in self.options:
            raise RecipeError(f"{what} {row.name}: the seed is that of the draw of support inputs; leave 'seed' out")
        return Aligned(builder)

    def scores(self, subject: str) -> bool:
        return self.models is None or subject in self.models

    def way(self, model_access: Access) -> Way:
        options = option_texts(self.options)
        if not self.needs:
            return Way(self.name, options, None, model_access, None, None)
        # The access of a score is the widest of all steps before it.
        access = max(model_access, self.access, key=_ACCESSES.index)
        return Way(self.name, options, self.shots, access, self.split, self.aligner)
