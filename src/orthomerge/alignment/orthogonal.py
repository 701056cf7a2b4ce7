"""Orthogonal map in closed form: Procrustes (Schönemann 1966) with a prior at the identity; see `rigid`.

MOMA (arXiv 2412.13526 v3, Eq. 8) learns this map by gradient with a penalty for not being orthogonal; here it is found
at once, is orthogonal to rounding, and has no learning rate.

Differs from the paper: the least squares loss instead of the mean norm, for which there is a closed form; a prior; a
shift where the head has a bias.
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

__all__ = ["Orthogonal"]


@dataclass(frozen=True)
class Orthogonal:
    """`kappa`: strength of the prior, 0 for plain Procrustes; `bias`: move the means onto each other as well."""

    kappa: float | Literal["auto"] = "auto"
    bias: bool = True

    def __post_init__(self) -> None:
        strength("kappa", self.kappa)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        return self.solve(problem.sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        found = choose_rigid(sums, head, kappa=self.kappa, bias=self.bias)
        facts = {"kappa": found.kappa, "shift": found.share}
        return Alignment(found.folded_into(head, task=sums.task), facts)
