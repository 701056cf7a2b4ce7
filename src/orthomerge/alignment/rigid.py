"""Orthogonal map from merged to expert features, with a prior at the identity.

Schönemann 1966 for Procrustes: of all orthogonal A the one that minimises sum ||A h - t||^2 is polar(S), S = sum t h^T.
A matrix-Langevin prior, p(A) proportional to exp(kappa s tr A), makes it

    A = polar(S + kappa s I),   s = tr(C) / d:

kappa = 0 is Procrustes, which is arbitrary in directions without inputs; kappa = infinity is the identity.

kappa and the share of the shift of the means that is applied are chosen by cross-validation: of all choices whose mean
squared error of the first map's outputs is within one standard error (over folds) of the best, the one nearest to no
change. For this choice alone, features are projected on their `_LEADING` leading directions.

`similarity` (MOMA's Table 1: A^T A = s I) also has a scale, tr(A^T S) / tr(C).

Differs from the paper: MOMA (arXiv 2412.13526 v3, Eq. 8) learns the rotation by gradient with a penalty; here it is the
closed form of the least squares loss, with a prior, and with a shift where the head has a bias.

Letters: h, t inputs from merged and expert encoder, rows of H, T [n, d]; C = sum h h^T, S [d, d]; W [m, d] first map.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

import torch

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.folding import centred_rows, folded
from orthomerge.alignment.problem import Problem, Solved, check_strength, near_best
from orthomerge.core.errors import NumericalError

KAPPAS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.01, 1e-4)
_SHIFTS = (0.0, 0.5, 1.0)
_LEADING = 96
FOLDS = 5
_ROUNDING = 1e-12  # share of the squares below which the variance is rounding


@dataclass(frozen=True)
class Orthogonal(Solved):
    """`kappa`: strength of the prior, 0 for plain Procrustes; `bias`: also map the means onto each other."""

    kappa: float | Literal["auto"] = "auto"
    bias: bool = True

    scaled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_strength("kappa", self.kappa)

    def align(self, problem: Problem) -> Alignment:
        rigid = choose_rigid(problem, kappa=self.kappa, bias=self.bias, scaled=self.scaled)
        head = folded(problem.head, rigid.scale * rigid.A, rigid.shift, task=problem.task)
        facts = {"kappa": rigid.kappa, "shift": rigid.share}
        return Alignment(head, {**facts, "scale": rigid.scale} if self.scaled else facts)


@dataclass(frozen=True)
class Similarity(Orthogonal):
    """Orthogonal map and one scale. `kappa`: strength of the prior at the identity; `bias`: also map the means."""

    scaled: ClassVar[bool] = True


@dataclass(frozen=True)
class Rigid:
    """The map scale A x + shift, its prior `kappa`, and the `share` of the shift between the means."""

    A: torch.Tensor
    scale: float
    shift: torch.Tensor | None
    kappa: float
    share: float


def polar_factor(X: torch.Tensor, *, task: str) -> torch.Tensor:
    """Matrix with orthonormal rows or columns nearest to X."""
    try:
        U, _, Vt = torch.linalg.svd(X, full_matrices=False)
    except RuntimeError as error:  # torch.linalg.LinAlgError, which torch does not export to type checkers
        raise NumericalError(f"an SVD for the map of {task!r} did not converge; use the aligner 'ridge'") from error
    return torch.matmul(U, Vt)


def turn_of(S: torch.Tensor, energy: float, kappa: float, *, d: int, task: str) -> torch.Tensor:
    """Orthogonal A [r, r] from S [r, r] and energy = tr(C), for features of width d projected to width r."""
    identity = torch.eye(len(S), dtype=S.dtype)
    if math.isinf(kappa) or energy <= 0:
        return identity
    return polar_factor(S + kappa * energy / d * identity, task=task)


def scale_of(A: torch.Tensor, S: torch.Tensor, energy: float, kappa: float) -> float:
    """Scale of A, shrunk towards 1 as A is towards the identity."""
    if math.isinf(kappa) or energy <= 0:
        return 1.0
    return (float((A * S).sum()) + kappa * energy) / ((1 + kappa) * energy)


def spread(H: torch.Tensor, T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre H and T; exactly zero if all inputs are equal to rounding."""
    centred = H - H.mean(0)
    if float(centred.square().sum()) > _ROUNDING * float(H.square().sum()):
        return centred, T - T.mean(0)
    return torch.zeros_like(H), torch.zeros_like(T)


def choose_rigid(problem: Problem, *, kappa: float | Literal["auto"], bias: bool, scaled: bool = False) -> Rigid:
    """Fit the map with kappa and the full shift (with `bias`) or, with `auto`, with both chosen by cross-validation."""
    bias = bias and problem.biased
    if kappa == "auto":
        chosen, share = _cross_validated(problem, KAPPAS, bias=bias, scaled=False)
        if scaled:  # with the kappa that is best without a scale, or with any if that is infinity
            kappas = KAPPAS if math.isinf(chosen) else (math.inf, chosen)
            chosen, share = _cross_validated(problem, kappas, bias=bias, scaled=True)
    else:
        chosen, share = kappa, 1.0 if bias else 0.0
    H, T = spread(problem.H, problem.T) if bias else (problem.H, problem.T)
    S, energy = T.T @ H, float(H.square().sum())
    A = turn_of(S, energy, chosen, d=H.shape[1], task=problem.task)
    scale = scale_of(A, S, energy, chosen) if scaled else 1.0
    shift = share * (problem.T.mean(0) - scale * A @ problem.H.mean(0)) if bias else None
    return Rigid(A, scale, shift, chosen, share)


def _cross_validated(problem: Problem, kappas: Sequence[float], *, bias: bool, scaled: bool) -> tuple[float, float]:
    """Return kappa and share: the first, from the strongest prior on, within one standard error of the best."""
    W, H, T, d = centred_rows(problem.head), problem.H, problem.T, problem.H.shape[1]
    shares = _SHIFTS if bias else (0.0,)
    if len(H) < 2:  # nothing to choose by
        return kappas[0], shares[0]
    if d > _LEADING:
        Q = _leading(H, T)
        W, H, T = W @ Q, H @ Q, T @ Q
    number, losses = torch.arange(len(H)) % FOLDS, []
    for fold in range(min(FOLDS, len(H))):
        fit_H, fit_T, h, t = (values[rows] for rows in (number != fold, number == fold) for values in (H, T))
        source, target = spread(fit_H, fit_T) if bias else (fit_H, fit_T)
        S, energy = target.T @ source, float(source.square().sum())
        row = []
        for kappa in kappas:
            A = turn_of(S, energy, kappa, d=d, task=problem.task)
            B = (scale_of(A, S, energy, kappa) if scaled else 1.0) * W @ A
            shift = W @ fit_T.mean(0) - B @ fit_H.mean(0)
            gap = h @ B.T - t @ W.T
            row += [float((gap + share * shift).square().sum(1).mean()) for share in shares]
        losses.append(row)
    return list(product(kappas, shares))[near_best(torch.tensor(losses, dtype=torch.float64).T)[0]]


def _leading(H: torch.Tensor, T: torch.Tensor) -> torch.Tensor:
    """Orthonormal basis [d, r] of the leading directions of both encoders' features."""
    start = torch.randn(H.shape[1], _LEADING // 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = H.T @ (H @ start), T.T @ (H @ start)
    for _ in range(2):
        one = H.T @ (H @ torch.linalg.qr(one)[0])
        other = T.T @ (H @ (H.T @ (T @ torch.linalg.qr(other)[0])))
    basis: torch.Tensor = torch.linalg.qr(torch.cat([one, other], 1))[0]
    return basis
