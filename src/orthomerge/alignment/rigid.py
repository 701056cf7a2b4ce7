"""The orthogonal map from merged to expert features, with a prior that keeps what was never seen where it is.

Schönemann 1966 for Procrustes: of all orthogonal A the one that minimises sum ||A h - t||^2 is polar(S), S = sum t h^T.
A matrix-Langevin prior, p(A) proportional to exp(kappa s tr A), makes it

    A = polar(S + kappa s I),   s = tr(C) / d:

kappa = 0 is Procrustes, whose map is arbitrary where there were no inputs; kappa = infinity is the identity. A tiny
kappa is Procrustes with the identity for whatever it leaves open.

kappa and how much of the shift of the means is believed are chosen together by cross-validation: the mean squared error
of the first linear map's outputs on held-out inputs, of which every fold's moments know everything but a constant. Of
all choices within one standard error (over folds) of the best, the most careful is taken; "change nothing" is one of
them. For this choice, not for the map itself, wide features are looked at through their `_LEADING` leading directions.

`similarity` (MOMA's Table 1: A^T A = s I) has a scale beside the turn, the best one being tr(A^T S) / tr(C).

MOMA (arXiv 2412.13526 v3, Eq. 8) learns the rotation by gradient with a penalty for not being orthogonal; here it is
found at once, is orthogonal to rounding, and has no learning rate.
Differs from the paper: the least squares loss instead of the mean norm, for which there is a closed form; a prior; a
shift where the head has a bias.

Letters: h, t what the head reads of merged and expert encoder; C = sum h h^T, S [d, d]; W [m, d] the first linear map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.folding import centred_rows, first_map, with_first_map
from orthomerge.alignment.least_squares import careful, check_strength
from orthomerge.alignment.moments import Moments
from orthomerge.alignment.problem import Problem, Solved
from orthomerge.core.errors import NumericalError
from orthomerge.models.heads import Head

KAPPAS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.01, 1e-4)
_SHIFTS = (0.0, 0.5, 1.0)
_LEADING = 96
_ROUNDING = 1e-12  # share of the moments below which what is left without the means is rounding


@dataclass(frozen=True)
class Orthogonal(Solved):
    """`kappa`: strength of the prior, 0 for plain Procrustes; `bias`: move the means onto each other as well."""

    kappa: float | Literal["auto"] = "auto"
    bias: bool = True

    def __post_init__(self) -> None:
        check_strength("kappa", self.kappa)

    def align(self, problem: Problem) -> Alignment:
        rigid = choose_rigid(problem, kappa=self.kappa, bias=self.bias)
        facts = {"kappa": rigid.kappa, "shift": rigid.share}
        return Alignment(rigid.folded_into(problem.head, task=problem.task), facts)


@dataclass(frozen=True)
class Similarity(Orthogonal):
    """A rotation and one scale. `kappa`: strength of the prior at the identity; `bias`: move the means as well."""

    def align(self, problem: Problem) -> Alignment:
        rigid = choose_rigid(problem, kappa=self.kappa, bias=self.bias, scaled=True)
        facts = {"kappa": rigid.kappa, "shift": rigid.share, "scale": rigid.scale}
        return Alignment(rigid.folded_into(problem.head, task=problem.task), facts)


@dataclass(frozen=True)
class Rigid:
    """x is mapped to scale A x + shift; `kappa` and `share` (of the shift that was believed) are what was chosen.

    `means`: of h and t, if there is a shift.
    """

    A: torch.Tensor
    scale: float
    means: tuple[torch.Tensor, torch.Tensor] | None
    kappa: float
    share: float

    @property
    def shift(self) -> torch.Tensor | None:
        """As far as it was believed, the means are moved onto each other."""
        return None if self.means is None else self.share * (self.means[1] - self.scale * self.A @ self.means[0])

    def folded_into(self, head: Head, *, task: str) -> Head:
        """The head that reads x as `head` reads scale A x + shift."""
        first = first_map(head)
        weight = self.scale * (first.weight.double() @ self.A)
        bias = None if first.bias is None else first.bias.double()
        if bias is not None and self.means is not None:
            bias = bias + self.share * (first.weight.double() @ self.means[1] - weight @ self.means[0])
        return with_first_map(head, weight, bias, task=task)


def polar_factor(X: torch.Tensor, *, task: str) -> torch.Tensor:
    """The matrix with orthonormal rows or columns nearest to X."""
    try:
        U, _, Vt = torch.linalg.svd(X, full_matrices=False)
    except RuntimeError as error:  # torch.linalg.LinAlgError, which torch does not export to type checkers
        raise NumericalError(f"an SVD for the map of {task!r} did not converge; use the aligner 'ridge'") from error
    factor: torch.Tensor = U @ Vt
    return factor


def turn_of(moments: Moments, kappa: float, *, d: int, task: str) -> torch.Tensor:
    """A [r, r] from moments of rows of width r, of features that are d wide."""
    energy, X = float(moments.C.trace()), moments.S.clone()
    if math.isinf(kappa) or energy <= 0:
        return torch.eye(len(X), dtype=X.dtype, device=X.device)
    X.diagonal().add_(kappa * energy / d)
    return polar_factor(X, task=task)


def scale_of(A: torch.Tensor, moments: Moments, kappa: float) -> float:
    """The scale that goes with A, shrunk towards 1 as A is towards the identity."""
    along, energy = float((A * moments.S).sum()), float(moments.C.trace())
    return 1.0 if math.isinf(kappa) or energy <= 0 else (along + kappa * energy) / ((1 + kappa) * energy)


def spread(moments: Moments) -> Moments:
    """The moments without the means, and exactly zero for inputs that are all the same: rounding has no direction."""
    centred = moments.centred()
    if float(centred.C.trace()) > _ROUNDING * float(moments.C.trace()):
        return centred
    nothing = torch.zeros_like(centred.C)
    return Moments(centred.n, centred.sum_h, centred.sum_t, nothing, nothing.clone())


def loss_of(B: torch.Tensor, c: torch.Tensor, W: torch.Tensor, held_out: Moments) -> float:
    """Sum of ||B h + c - W t||^2 over held-out rows, but for the part that only depends on t."""
    linear = B @ held_out.sum_h - W @ held_out.sum_t
    squares = (B @ held_out.C * B).sum() - 2 * (B * (W @ held_out.S)).sum()
    return float(squares + 2 * c @ linear + held_out.n * c @ c)


def choose_rigid(problem: Problem, *, kappa: float | Literal["auto"], bias: bool, scaled: bool = False) -> Rigid:
    """The map with a given kappa and the whole shift or, with `auto`, with what held-out inputs say of both.

    `bias`: with a shift, if the head has a bias that can take it up.
    """
    total, bias = problem.moments, bias and problem.biased
    if kappa == "auto":
        chosen, share = _cross_validated(problem, KAPPAS, bias=bias, scaled=False)
        if scaled:  # of the turn that is best without a scale, or else of all: a scale may be worth it by itself
            kappas = KAPPAS if math.isinf(chosen) else (math.inf, chosen)
            chosen, share = _cross_validated(problem, kappas, bias=bias, scaled=True)
    else:
        chosen, share = kappa, 1.0 if bias else 0.0
    moments = spread(total) if bias else total
    A = turn_of(moments, chosen, d=total.d, task=problem.task)
    scale = scale_of(A, moments, chosen) if scaled else 1.0
    return Rigid(A, scale, (total.mean_h, total.mean_t) if bias else None, chosen, share)


def _cross_validated(problem: Problem, kappas: Sequence[float], *, bias: bool, scaled: bool) -> tuple[float, float]:
    """Of all kappas and shares, from careful to bold, the first that is within one standard error of the best."""
    W, folds, d = centred_rows(problem.head), problem.folds, problem.moments.d
    shares = _SHIFTS if bias else (0.0,)
    if len(folds) < 2:  # one input: nothing to choose by
        return kappas[0], shares[0]
    if d > _LEADING:
        Q = _leading(problem.moments)
        W, folds = W @ Q, tuple(part.through(Q) for part in folds)
    losses = []
    for number, held_out in enumerate(folds):
        train = Moments.total(part for other, part in enumerate(folds) if other != number)
        moments = spread(train) if bias else train
        row = []
        for kappa in kappas:
            A = turn_of(moments, kappa, d=d, task=problem.task)
            B = (scale_of(A, moments, kappa) if scaled else 1.0) * W @ A
            c = W @ train.mean_t - B @ train.mean_h
            row += [loss_of(B, share * c, W, held_out) / held_out.n for share in shares]
        losses.append(row)
    chosen = careful(torch.tensor(losses, dtype=torch.float64).T)
    return list(product(kappas, shares))[chosen]


def _leading(total: Moments) -> torch.Tensor:
    """An orthonormal basis [d, r] of the directions along which both encoders' features lie most."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(total.d, _LEADING // 2, generator=generator, dtype=torch.float64)
    one, other = total.C @ start, total.S @ start
    for _ in range(2):
        one, other = total.C @ torch.linalg.qr(one)[0], total.S @ (total.S.T @ torch.linalg.qr(other)[0])
    basis: torch.Tensor = torch.linalg.qr(torch.cat([one, other], 1))[0]
    return basis
