"""How models are scored: a protocol with its options, the support inputs that it gets, and how often it is repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orthomerge.alignment.aligners import aligners
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Access, Split
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.evidence import Builder, Need
from orthomerge.evaluation.protocols import find_protocol, make_protocol, protocols
from orthomerge.evaluation.records import Record

Shots = int | float | None  # per class; a share of the split if below 1; None: all of it
_WIDTH: dict[Access, int] = {"data-free": 0, "inductive": 1, "transductive": 2}


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
        if self.seeds < 1:
            raise RecipeError(f"'seeds' must be at least 1, got {self.seeds}")
        if self.first < 0:
            raise RecipeError(f"'first' must not be negative, got {self.first}")
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
        return Aligned.by(self.aligner, self.options)

    def scores(self, subject: str) -> bool:
        """Whether a subject of this name is scored."""
        return self.models is None or subject in self.models

    def annotate(self, record: Record) -> Record:
        """The record, which says how it was scored; a protocol that needs nothing says less."""
        record = replace(record, protocol=self.name, options=dict(self.options))
        if not self.needs:
            return record
        return replace(
            record,
            # A score has seen the most that any step before it has seen.
            access=max(record.access, self.access, key=_WIDTH.__getitem__),
            shots=self.shots,
            support=self.split,
            aligner=self.aligner,
        )
