"""Orthogonal map times one number, in closed form; see `rigid`.

The similarity transform of MOMA's Table 1 (arXiv 2412.13526 v3): A^T A = s I. With A orthogonal and given, the best
scale is tr(A^T S) / tr(C).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import choose_rigid
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Similarity"]


@dataclass(frozen=True)
class Similarity:
    """`kappa`: strength of the prior at the identity; `bias`: move the means onto each other as well."""

    kappa: float | Literal["auto"] = "auto"
    bias: bool = True

    def __post_init__(self) -> None:
        strength("kappa", self.kappa)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        return self.solve(problem.sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        found = choose_rigid(sums, head, kappa=self.kappa, bias=self.bias, scaled=True)
        facts = {"kappa": found.kappa, "shift": found.share, "scale": found.scale}
        return Alignment(found.folded_into(head, task=sums.task), facts)
