"""Any invertible linear map: the invertible transform of MOMA's Table 1.

The invertible matrices are all but a set of measure zero, so the best of them is the best linear map, unless that one
is singular: then it has no best, and singular values below `floor` times the largest are lifted to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import folded
from orthomerge.alignment.least_squares import linear_map, strength_from_sums
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.sums import Sums
from orthomerge.errors import RecipeError
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Invertible", "lifted"]


@dataclass(frozen=True)
class Invertible:
    """`strength`: as of `linear`; `floor`: the smallest singular value, as a share of the largest."""

    strength: float | Literal["auto"] = "auto"
    floor: float = 1e-6

    def __post_init__(self) -> None:
        strength("strength", self.strength)
        if not 0 < self.floor < 1:
            raise RecipeError(f"'floor' must be between 0 and 1, got {self.floor}")

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        return self._with(problem.strength if self.strength == "auto" else self.strength, problem.sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        return self._with(strength_from_sums(sums, head) if self.strength == "auto" else self.strength, sums, head)

    def _with(self, chosen: float, sums: Sums, head: Head) -> Alignment:
        A, condition = lifted(linear_map(sums.total, chosen, biased=False)[0], self.floor)
        return Alignment(folded(head, A, task=sums.task), {"strength": chosen, "condition": condition})


def lifted(A: torch.Tensor, floor: float) -> tuple[torch.Tensor, float]:
    """A with no singular value below `floor` of the largest, and a bound of its condition number."""
    inverse, info = torch.linalg.inv_ex(A)
    # The Frobenius bound is cheap and never too small; only near the floor is the SVD worth its time.
    condition = float(torch.linalg.matrix_norm(A) * torch.linalg.matrix_norm(inverse)) if not info else float("inf")
    if condition * floor < 1:
        return A, condition
    U, s, Vt = torch.linalg.svd(A)
    s = s.clamp_min(floor * float(s[0]))
    return U * s @ Vt, float(s[0] / s[-1])
