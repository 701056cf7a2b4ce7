"""Any linear map, by least squares shrunk towards the identity: the linear transform of MOMA's Table 1; see
`least_squares`.

Every linear map can be folded, not only the orthogonal ones (arXiv 2412.13526 v3 uses no more than <A g, w> = <g, A^T
w>), so this costs as little as `orthogonal`.

Differs from the paper: the least squares loss, for which there is a closed form; a prior, without which fewer inputs
than features would fit anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import first_map, with_first_map
from orthomerge.alignment.least_squares import factor_once, linear_map, strength_from_sums
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Linear"]


@dataclass(frozen=True)
class Linear:
    """`strength` of the pull to the identity: 0 for plain least squares, auto to let held-out inputs decide."""

    strength: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        strength("strength", self.strength)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        sums = problem.sums  # first: the decomposition makes use of them
        return self._with(problem.strength if self.strength == "auto" else self.strength, sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        return self._with(strength_from_sums(sums, head) if self.strength == "auto" else self.strength, sums, head)

    def _with(self, chosen: float, sums: Sums, head: Head) -> Alignment:
        first = first_map(head)
        factor = partial(factor_once, sums, chosen)
        weight, _ = linear_map(sums.total, chosen, first.weight.double(), biased=False, factor=factor)
        return Alignment(with_first_map(head, weight, first.bias, task=sums.task), {"strength": chosen})
