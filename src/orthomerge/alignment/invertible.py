"""Any invertible linear map: the invertible transform of MOMA's Table 1.

The invertible matrices are all but a set of measure zero, so the best of them is the best linear map, unless that one
is singular: then it has no best, and singular values below `floor` times the largest are lifted to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import folded
from orthomerge.alignment.gram import gram
from orthomerge.alignment.least_squares import factor_once, linear_map, strength_from_sums
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.sums import Sums
from orthomerge.errors import RecipeError
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Invertible", "lifted"]

_SQUARED = 1e4  # condition up to which A^T A is enough for eight digits


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
        sums = problem.sums  # first: the decomposition makes use of them
        return self._with(problem.strength if self.strength == "auto" else self.strength, sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        return self._with(strength_from_sums(sums, head) if self.strength == "auto" else self.strength, sums, head)

    def _with(self, chosen: float, sums: Sums, head: Head) -> Alignment:
        A, _ = linear_map(sums.total, chosen, biased=False, factor=partial(factor_once, sums, chosen))
        A, condition = lifted(A, self.floor)
        return Alignment(folded(head, A, task=sums.task), {"strength": chosen, "condition": condition})


def lifted(A: torch.Tensor, floor: float) -> tuple[torch.Tensor, float]:
    """A with no singular value below `floor` of the largest, and a bound of its condition number."""
    # The Frobenius bound is cheap and never too small; only near the floor is the SVD worth its time.
    condition = float(torch.linalg.matrix_norm(A)) * _inverse_norm(A)
    if condition * floor < 1:
        return A, condition
    U, s, Vt = torch.linalg.svd(A)
    s = s.clamp_min(floor * float(s[0]))
    return U * s @ Vt, float(s[0] / s[-1])


def _inverse_norm(A: torch.Tensor) -> float:
    """||A^-1||_F, infinite of a singular matrix."""
    # With A^T A = L L^T it is ||L^-1||_F, for two thirds of the price.
    L, info = torch.linalg.cholesky_ex(gram(A))
    if not info:
        norm = float(torch.linalg.matrix_norm(_lower_inverse(L)))
        if norm * float(torch.linalg.matrix_norm(A)) < _SQUARED:
            return norm
    inverse, info = torch.linalg.inv_ex(A)
    return float("inf") if info else float(torch.linalg.matrix_norm(inverse))


def _lower_inverse(L: torch.Tensor) -> torch.Tensor:
    """L^-1 of a lower triangle, by halves: a solve does not know that its right-hand side has zeros."""
    half = len(L) // 2
    if half < 96:
        eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
        inverse: torch.Tensor = torch.linalg.solve_triangular(L, eye, upper=False)
        return inverse
    found = torch.zeros_like(L)
    found[:half, :half], found[half:, half:] = _lower_inverse(L[:half, :half]), _lower_inverse(L[half:, half:])
    found[half:, :half] = -found[half:, half:] @ (L[half:, :half] @ found[:half, :half])
    return found
