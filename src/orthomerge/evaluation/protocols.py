"""How models are scored: the table of protocols, written by hand, and one protocol with its options and its support.

"Current Eval" of FT-Classifier and of MOMA (Eq. 11) is the expert's head as it is: logits g(x; theta_m) W_t^T + b_t,
what every merging paper reports. Every aligner is a protocol, too: it sees features of the merged encoder and of the
expert on the same unlabelled inputs, and starts from the expert's own head, whatever the merged model has.

Third parties add rows through the entry-point group `orthomerge.protocols`; each entry loads a `Row`. The joint label
space is no row: it is a way to score any of these (`answers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal, cast

from orthomerge.alignment.aligners import Aligner, aligners, make_aligner
from orthomerge.core.checks import at_least_one, not_negative
from orthomerge.core.errors import RecipeError
from orthomerge.core.rows import find_row, instance_of, maker_of, with_plugins
from orthomerge.data.task import Access, Split
from orthomerge.evaluation.evidence import Builder, Evidence, Need
from orthomerge.evaluation.records import Way, option_texts
from orthomerge.models.heads import Classifier, Head

Shots = int | float | None  # per class; a share of the split if below 1; None: all of it
_WIDTH: dict[Access, int] = {"data-free": 0, "inductive": 1, "transductive": 2}


@dataclass(frozen=True)
class Current:
    """The head as it is."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    def build(self, evidence: Evidence) -> Head:
        return evidence.head


@dataclass(frozen=True)
class Aligned:
    """The head that an aligner fits; if the aligner has a `seed`, that of the evidence is used instead."""

    aligner: Aligner

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "expert"})

    def build(self, evidence: Evidence) -> Classifier:
        aligner: Any = self.aligner
        if hasattr(aligner, "seed"):
            aligner = replace(aligner, seed=evidence.seed)
        classifier: Classifier = aligner.fit(evidence.pair(), evidence.head).classifier
        return classifier


@dataclass(frozen=True)
class Row:
    """One protocol. `maker`: `module:Class` of a builder or an aligner, imported when first used."""

    name: str
    maker: str
    title: str
    reference: str

    @property
    def needs(self) -> frozenset[Need]:
        """What evidence its class declares; an aligner declares nothing and needs what every aligner needs."""
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
    """Our rows, then those of installed plug-ins."""
    return with_plugins(PROTOCOLS, Row, group="orthomerge.protocols")


def find_protocol(name: str) -> Row:
    """The row of a protocol; an unknown name offers the nearest."""
    return find_row(protocols(), name, what="protocol")


def make_protocol(name: str, options: Mapping[str, Any] | None = None) -> Builder:
    """A protocol from its name and options; an aligner becomes one."""
    options = options or {}
    builder = instance_of(find_protocol(name), options, what="protocol")
    if not hasattr(builder, "fit"):
        return cast("Builder", builder)
    if "seed" in options:
        raise RecipeError(f"protocol {name}: the seed is that of the draw of support inputs; leave 'seed' out")
    return Aligned(builder)


@dataclass(frozen=True)
class EvaluationProtocol:
    """`name`: an entry of the table of protocols. `aligner`: an entry of the table of aligners instead, whose options
    these then are; the name is `current`.

    `support`: the split of the support inputs under inductive access; transductive access takes them from the test
    split. `seeds`: draws of support inputs, from the seed `first` on. `fewer`: a class that has fewer inputs than
    `shots` gives all it has. `models`: names of the subjects to score this way; None: all.
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
                f"aligner {self.aligner!r} makes the head that is scored: its protocol is 'current', got {self.name!r}"
            )
        if self.access == "inductive" and self.support == "test":
            raise RecipeError(
                "inductive support must come from another split than the scored one, got 'test' for both; "
                "ask for transductive access by name"
            )

    @classmethod
    def of(cls, named: str | EvaluationProtocol) -> EvaluationProtocol:
        """The protocol or aligner of a name, with defaults; a protocol as it is."""
        if isinstance(named, EvaluationProtocol):
            return named
        if named not in protocols() and named in aligners():
            return cls(aligner=named)
        find_protocol(named)
        return cls(named)

    @property
    def needs(self) -> frozenset[Need]:
        """What evidence it looks at."""
        return Aligned.needs if self.aligner is not None else find_protocol(self.name).needs

    @property
    def split(self) -> Split:
        """Where its support inputs come from."""
        return self.support if self.access == "inductive" else "test"

    def builder(self) -> Builder:
        """What builds the classifier, with the options checked."""
        if self.aligner is None:
            return make_protocol(self.name, self.options)
        return Aligned(make_aligner(self.aligner, self.options))

    def scores(self, subject: str) -> bool:
        """Whether a subject of this name is scored."""
        return self.models is None or subject in self.models

    def way(self, seen: Access) -> Way:
        """How it scores a model whose making saw inputs of access `seen`."""
        options = option_texts(self.options)
        if not self.needs:
            return Way(self.name, options, None, seen, None, None)
        # A score has seen the most that any step before it has seen.
        access = max(seen, self.access, key=_WIDTH.__getitem__)
        return Way(self.name, options, self.shots, access, self.split, self.aligner)
