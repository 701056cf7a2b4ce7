"""What an aligner is: it looks at the same unlabelled inputs through two encoders and gives back a classifier.

An aligner that returns a `Head` adds nothing to the model: the head takes the place of the expert's own. Others return
a classifier with parameters of its own, which are counted and stored beside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from orthomerge.models.features import FeaturePair
    from orthomerge.models.heads import Classifier, Head


Fact = float | int | str | bool


@dataclass(frozen=True)
class Alignment:
    """A classifier for merged features, and what was found on the way: a strength, a defect, a decision."""

    classifier: Classifier
    facts: Mapping[str, Fact] = field(default_factory=dict)


class Aligner(Protocol):
    """One small class a method; its fields are its options. `head` is the expert's own, never changed."""

    def fit(self, pair: FeaturePair, head: Head) -> Alignment: ...
