"""A pair of features as aligners want it: checked, in float64, and as the head reads it; see `folding`.

What several aligners start from is computed once: sums, a decomposition, a strength.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert; Z [n, C] the expert's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from orthomerge.alignment.folding import centred_rows, first_map, logits_from, read_by
from orthomerge.alignment.least_squares import Spectrum, chosen_strength
from orthomerge.alignment.sums import Sums
from orthomerge.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.features.features import FeaturePair, Features
from orthomerge.heads import Head

__all__ = ["Problem"]


@dataclass(frozen=True, eq=False)
class Problem:
    """See the module's legend; `task` is for messages."""

    H: torch.Tensor
    T: torch.Tensor
    head: Head
    task: str

    @classmethod
    def of(cls, pair: FeaturePair, head: Head) -> Problem:
        """Checked: at least one input, all finite, both as wide as the head."""
        if not len(pair.merged):
            raise RecipeError(f"an aligner needs at least one input of {pair.merged.task!r}, got 0")
        merged, expert = (_checked(features, who, head) for who, features in _sides(pair))
        return cls(read_by(head, merged), read_by(head, expert), head, pair.merged.task)

    @cached_property
    def Z(self) -> torch.Tensor:  # noqa: N802 - the letter of the legend
        """The expert's logits, [n, C] in float64."""
        return logits_from(self.head, self.T)

    @cached_property
    def sums(self) -> Sums:
        """The sums over all inputs, in folds."""
        return Sums.of(self.H, self.T, self.task)

    @cached_property
    def spectrum(self) -> Spectrum:
        """The decomposition that every linear aligner starts from."""
        known = self.__dict__.get("sums")  # if somebody wanted them, so as not to sum twice
        return Spectrum.of(self.H, biased=self.biased, total=known and known.total)

    @property
    def known_spectrum(self) -> Spectrum | None:
        """The decomposition if somebody wanted it: some could use it, but not for what it costs."""
        return self.__dict__.get("spectrum")

    @cached_property
    def strength(self) -> float:
        """How much change leave-one-out allows."""
        return chosen_strength(self.spectrum, self.residual, seen=self.seen)

    @cached_property
    def residual(self) -> torch.Tensor:
        """What the head's first map sees of the difference T - H, [n, m]."""
        return (centred_rows(self.head) @ (self.T - self.H).T).T  # the fast way round

    @cached_property
    def seen(self) -> torch.Tensor:
        """The residual in the basis of the decomposition: U^T R, [r, m]."""
        return self.spectrum.seen(self.residual)

    @property
    def biased(self) -> bool:
        """Whether a shift of the features has a bias to go to."""
        return first_map(self.head).bias is not None


def _sides(pair: FeaturePair) -> tuple[tuple[str, Features], ...]:
    return ("merged", pair.merged), ("expert's", pair.expert)


def _checked(features: Features, who: str, head: Head) -> torch.Tensor:
    if features.values.shape[1] != head.width:
        raise IncompatibleError(
            f"the head of {features.task!r} reads {head.width} features but the {who} are {features.values.shape[1]}"
        )
    values = features.values.double()
    # A sum of finite numbers is finite, unless they are huge: a second look is hardly ever needed.
    if not values.sum().isfinite() and not (finite := features.values.isfinite().all(1)).all():
        raise NumericalError(
            f"{int((~finite).sum())} of {len(features)} {who} features of {features.task!r} are NaN or infinite; "
            "check the encoder that made them, no aligner can use them"
        )
    return values
