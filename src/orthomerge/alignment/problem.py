"""The features that aligners start from: checked, in float64, and as the head reads them.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert; Z [n, C] the expert's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.folding import centred_rows, first_map, logits_from, read_by, with_first_map
from orthomerge.alignment.least_squares import Spectrum, chosen_strength
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head, head_kind


@dataclass(frozen=True, eq=False)
class Problem:
    """A pair of features and the expert's head; several aligners share one decomposition. `task` is for messages."""

    H: torch.Tensor
    T: torch.Tensor
    head: Head
    task: str

    @classmethod
    def of(cls, pair: FeaturePair, head: Head) -> Problem:
        """Check that there is an input, that all are finite, and that both are as wide as the head."""
        if not len(pair.merged):
            raise RecipeError(f"an aligner needs at least one input of {pair.merged.task!r}, got 0")
        merged, expert = _checked(pair.merged, "merged", head), _checked(pair.expert, "expert's", head)
        return cls(read_by(head, merged), read_by(head, expert), head, pair.merged.task)

    @cached_property
    def Z(self) -> torch.Tensor:  # noqa: N802 - the letter of the legend
        """The expert's logits."""
        return logits_from(self.head, self.T)

    def divergence(self, logits: torch.Tensor) -> float:
        """The mean divergence of some logits [n, C] from the expert's."""
        return float(head_kind(self.head.kind).divergence(logits.double(), self.Z).mean())

    @cached_property
    def spectrum(self) -> Spectrum:
        """The decomposition of the inputs, with a column of ones where the head has a bias."""
        return Spectrum.of(self.H, biased=self.biased)

    @cached_property
    def unshifted(self) -> Spectrum:
        """The decomposition without a column of ones."""
        return Spectrum.of(self.H, biased=False) if self.biased else self.spectrum

    @cached_property
    def strength(self) -> float:
        """How much change leave-one-out allows."""
        return chosen_strength(self.spectrum, self.residual)

    @cached_property
    def residual(self) -> torch.Tensor:
        """What the head's first map sees of the difference T - H, [n, m]."""
        return (self.T - self.H) @ centred_rows(self.head).T

    @property
    def biased(self) -> bool:
        """Whether a shift of the features has a bias to go to."""
        return first_map(self.head).bias is not None

    def changed(self, change: torch.Tensor) -> Head:
        """The head with D^T [m, d] added to its first map or, with a bias, [m, d + 1], the last in units of a."""
        first, d = first_map(self.head), self.head.width
        bias = first.bias
        if bias is not None and change.shape[1] > d:
            bias = bias.double() + self.spectrum.a * change[:, d]
        return with_first_map(self.head, first.weight.double() + change[:, :d], bias, task=self.task)


class Solved:
    """An aligner that starts from a `Problem`."""

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        raise NotImplementedError


def _checked(features: Features, who: str, head: Head) -> torch.Tensor:
    if features.values.shape[1] != head.width:
        raise IncompatibleError(
            f"the head of {features.task!r} reads {head.width} features but the {who} are {features.values.shape[1]}"
        )
    values = features.values.double()
    finite = features.values.isfinite().all(1)
    if not finite.all():
        raise NumericalError(
            f"{int((~finite).sum())} of {len(features)} {who} features of {features.task!r} are NaN or infinite; "
            "check the encoder that made them, no aligner can use them"
        )
    return values
