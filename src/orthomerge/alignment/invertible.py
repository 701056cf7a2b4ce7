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

_SQUARED = ((torch.float32, 5e3), (torch.float64, 1e5))  # condition up to which A^T A is enough for two digits
_SURE = 0.9  # for what these may be wrong by
_HALF = 96  # width from which halves are worth it


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
    if condition * floor < _SURE:
        return A, condition
    U, s, Vt = torch.linalg.svd(A)
    s = s.clamp_min(floor * float(s[0]))
    return U * s @ Vt, float(s[0] / s[-1])


def _inverse_norm(A: torch.Tensor) -> float:
    """||A^-1||_F, infinite of a singular matrix."""
    # With A^T A = L L^T it is ||L^-1||_F, for two thirds of the price.
    for precision, largest in _SQUARED:
        L, info = torch.linalg.cholesky_ex(gram(A.to(precision)))
        if not info:
            _invert_lower(L)
            norm = float(torch.linalg.matrix_norm(L))
            if norm * float(torch.linalg.matrix_norm(A)) < largest:
                return norm
    inverse, info = torch.linalg.inv_ex(A)
    return float("inf") if info else float(torch.linalg.matrix_norm(inverse))


def _invert_lower(L: torch.Tensor) -> None:
    """A lower triangle, in place and by halves: a solve would not know that its right-hand side has zeros."""
    half = len(L) // 2
    if half < _HALF:
        eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
        L.copy_(torch.linalg.solve_triangular(L, eye, upper=False))
        return
    upper, lower, between = L[:half, :half], L[half:, half:], L[half:, :half]
    _invert_lower(upper)
    _invert_lower(lower)
    between.copy_(-lower @ (between @ upper))
