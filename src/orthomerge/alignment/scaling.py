"""Every feature times a number of its own, in closed form: the scaling transform of MOMA's Table 1.

a_j = (S_jj + p_j) / (C_jj + p_j) minimises sum (a_j h_j - t_j)^2 + p_j (a_j - 1)^2; the prior counts as `prior` inputs
of average size, so that a feature which is always zero keeps its factor 1.

Letters: C = sum h h^T, S = sum t h^T [d, d] of what the head reads; p_j = prior tr(C) / (n d).
"""

from __future__ import annotations

from dataclasses import dataclass

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import first_map, with_first_map
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Scaling"]


@dataclass(frozen=True)
class Scaling:
    """`prior`: how many inputs the prior at 1 counts for."""

    prior: float = 10.0

    def __post_init__(self) -> None:
        strength("prior", self.prior)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        return self.solve(problem.sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        total = sums.total
        C, S = total.C.diagonal(), total.S.diagonal()
        p = self.prior * C.mean() / total.n
        a = ((S + p) / (C + p)).nan_to_num(nan=1.0)  # 0 / 0: a feature that is always zero
        facts = {"least": float(a.min()), "most": float(a.max())}
        first = first_map(head)
        return Alignment(with_first_map(head, first.weight.double() * a, first.bias, task=sums.task), facts)
