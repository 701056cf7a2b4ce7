"""Procrustes where the head looks: the orthogonal map whose *logits* are nearest to the expert's.

Plain Procrustes spends most of its freedom on directions that the head never reads. Of W A with A orthogonal, all that
can be reached are the matrices with the Gram matrix of W: W' = K Q with K = (W W^T)^1/2 [m, m] and Q [m, d] with
orthonormal rows (on the range of K). Minimise over Q

    sum_i ||K Q x_i - W t_i||^2  -  2 kappa s <K^2 Q_0, Q>

by majorisation: with L = lambda_max(C), or a bound of it, here ||C^2||_F^1/2, every step

    Q <- polar(K^2 (L Q - Q C) + K W S + kappa s K^2 Q_0)

lowers it, because tr(K^2 Q Q^T) is the same for all Q. Steps start ahead of where the last one ended, as in Nesterov
1983; one that leads up is taken back, and tried again from there. The prior keeps directions without inputs where they
are; its strength is taken from the cross-validated plain map (`rigid`), whose head is also where the iteration starts.

Letters: x, t what the head reads of merged and expert encoder; C = sum x x^T, S = sum t x^T [d, d], s = tr(C) / d; W
[m, d] the head's first linear map, Q_0 the polar factor of W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import first_map, with_first_map
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import choose_rigid, spread
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

__all__ = ["LogitProcrustes"]

_SETTLED = 1e-5  # share of all that was gained which a step must gain to be worth another
_SMALL = 1e-12  # share of the objective that is rounding
_SQUARED = 1e-10  # condition from which Y Y^T is enough on the way; where it ends, Q is made orthogonal to rounding


@dataclass(frozen=True)
class LogitProcrustes:
    """`kappa`, `bias`: as of `orthogonal`; `steps`: most iterations."""

    kappa: float | Literal["auto"] = "auto"
    bias: bool = True
    steps: int = 200

    def __post_init__(self) -> None:
        strength("kappa", self.kappa)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        return self.solve(problem.sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        start = choose_rigid(sums, head, kappa=self.kappa, bias=self.bias)
        if math.isinf(start.kappa):
            return Alignment(
                with_shift(head, first_map(head).weight.double(), start.share, sums), _facts(start.kappa, 0)
            )
        first, total = first_map(head), sums.total
        W = first.weight.double()
        moments = spread(total) if start.shift is not None else total
        made, steps = descend(W, W @ start.A, moments, start.kappa, d=total.d, steps=self.steps)
        return Alignment(with_shift(head, made, start.share, sums), _facts(start.kappa, steps))


def with_shift(head: Head, weight: torch.Tensor, share: float, sums: Sums) -> Head:
    """The head with another weight, and a bias that moves the means onto each other as far as `share` says."""
    first, total = first_map(head), sums.total
    if first.bias is None:
        return with_first_map(head, weight, None, task=sums.task)
    shift = first.weight.double() @ total.mean_t - weight @ total.mean_h
    return with_first_map(head, weight, first.bias.double() + share * shift, task=sums.task)


def descend(
    W: torch.Tensor,
    start: torch.Tensor,
    moments: Moments,
    kappa: float,
    *,
    d: int,
    steps: int,
    settled: float = _SETTLED,
) -> tuple[torch.Tensor, int]:
    """W' [m, d] with W' W'^T = W W^T, from `start`, and the number of iterations."""
    if float(moments.C.trace()) <= 0:  # every W' is as good: stay
        return start, 0
    values, vectors = torch.linalg.eigh(W @ W.T)
    kept = values > 1e-10 * values[-1]
    k, basis = values[kept][:, None], vectors[:, kept]  # K = basis diag(sqrt k) basis^T
    root, C, s = k.sqrt(), moments.C, float(moments.C.trace()) / d
    bound = float(torch.linalg.matrix_norm(C @ C)) ** 0.5
    # In the basis of K, Q [r, d] has orthonormal rows, and K is diagonal.
    pull = root * (basis.T @ (W @ moments.S)) + kappa * s * root * (basis.T @ W)

    def reached(Q: torch.Tensor) -> _Point:
        QC = Q @ C
        return _Point(Q, QC, float((k * Q * QC - 2 * pull * Q).sum()))

    def step(point: _Point) -> _Point:
        return reached(_rows_polar(k * (bound * point.Q - point.QC) + pull))

    at = first = reached(basis.T @ start / root)
    ahead, pace, done = at, 1.0, 0
    while done < steps:
        done += 1
        new = step(ahead)
        if new.value > at.value and ahead is not at:
            new, pace = step(at), 1.0
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        ahead, pace = new.beyond(at, (pace - 1) / faster), faster
        fall, at = at.value - new.value, new
        if fall <= settled * max(first.value - at.value, _SMALL * abs(at.value)):
            break
    return basis @ (root * _by_svd(at.Q)), done


@dataclass(frozen=True, eq=False)
class _Point:
    """Q, Q C, and the objective at Q."""

    Q: torch.Tensor
    QC: torch.Tensor
    value: float

    def beyond(self, before: _Point, share: float) -> _Point:
        """Further along from another point; the objective there is not wanted."""
        Q, QC = self.Q + share * (self.Q - before.Q), self.QC + share * (self.QC - before.QC)
        return _Point(Q, QC, math.nan)


def _rows_polar(Y: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthonormal rows to Y [r, d]."""
    values, vectors = torch.linalg.eigh(Y @ Y.T)
    if float(values[0]) > _SQUARED * float(values[-1]):
        near: torch.Tensor = vectors / values.sqrt() @ (vectors.T @ Y)
        return near
    return _by_svd(Y)


def _by_svd(Y: torch.Tensor) -> torch.Tensor:
    U, _, Vt = torch.linalg.svd(Y, full_matrices=False)
    found: torch.Tensor = U @ Vt
    return found


def _facts(kappa: float, steps: int) -> dict[str, float | int | str | bool]:
    return {"kappa": kappa, "steps": steps}
