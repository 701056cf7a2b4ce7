"""Any affine map, by least squares shrunk towards the identity: the affine transform of MOMA's Table 1; see
`least_squares`.

A head without a bias has nowhere to put the shift: there it is the linear map. Differs from the paper: as `linear`
does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import first_map, with_first_map
from orthomerge.alignment.least_squares import Spectrum, linear_map, strength_from_sums
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Affine"]


@dataclass(frozen=True)
class Affine:
    """`strength` of the pull to the identity: 0 for plain least squares, auto to let held-out inputs decide."""

    strength: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        strength("strength", self.strength)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        sums = problem.sums  # first: the decomposition makes use of them
        if self.strength == "auto":
            return self._with(problem.strength, sums, problem.head, problem.spectrum)
        return self._with(self.strength, sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        return self._with(strength_from_sums(sums, head) if self.strength == "auto" else self.strength, sums, head)

    def _with(self, chosen: float, sums: Sums, head: Head, spectrum: Spectrum | None = None) -> Alignment:
        first = first_map(head)
        weight, shift = linear_map(
            sums.total, chosen, first.weight.double(), biased=first.bias is not None, spectrum=spectrum
        )
        bias = None if first.bias is None or shift is None else first.bias.double() + shift
        return Alignment(with_first_map(head, weight, bias, task=sums.task), {"strength": chosen})
