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

Where the eigenvectors of [x, a] are known already (`least_squares`), Q is turned into their basis, in which Q C takes
no product: C is diagonal there but for the column of ones and the means.

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
from orthomerge.alignment.gram import gram
from orthomerge.alignment.least_squares import Spectrum
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import choose_rigid, seen_by
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

__all__ = ["Basis", "LogitProcrustes"]

_SETTLED = 1e-5  # share of all that was gained which a step must gain to be worth another
_SMALL = 1e-12  # share of the objective that is rounding
_SQUARED = 1e-10  # condition from which Y Y^T is enough on the way; where it ends, Q is made orthogonal to rounding
_ROUNDED = 1e-8  # by what rows may fail to be orthonormal for one step to make them so
_MEANS = 1e4  # times all else: from where the means leave too few digits for it


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
        return self._from(problem.sums, problem.head, problem.known_spectrum)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        return self._from(sums, head, None)

    def _from(self, sums: Sums, head: Head, spectrum: Spectrum | None) -> Alignment:
        start = choose_rigid(sums, head, kappa=self.kappa, bias=self.bias)
        if math.isinf(start.kappa):
            return Alignment(
                with_shift(head, first_map(head).weight.double(), start.share, sums), _facts(start.kappa, 0)
            )
        first, total = first_map(head), sums.total
        W = first.weight.double()
        moments = seen_by(sums, bias=start.means is not None)
        basis = None if spectrum is None else Basis.of(spectrum, total, moments)
        made, steps = descend(W, start.read, moments, start.kappa, d=total.d, steps=self.steps, basis=basis)
        return Alignment(with_shift(head, made, start.share, sums), _facts(start.kappa, steps))


@dataclass(frozen=True, eq=False)
class Basis:
    """Axes [d, r] in which C = diag(values) - one^T other, of [2, r] or less, for rows such as Q's; `bound`: L."""

    axes: torch.Tensor
    values: torch.Tensor
    one: torch.Tensor
    other: torch.Tensor
    bound: float

    @classmethod
    def of(cls, spectrum: Spectrum, total: Moments, moments: Moments) -> Basis | None:
        """From the decomposition of the same inputs; `moments`: with their means or without.

        Nothing where inputs do not reach every direction, or where all else would drown in the means.
        """
        axes, values = spectrum.V[: total.d], spectrum.s.square()
        if len(values) < len(spectrum.V) or float(total.C.trace()) > _MEANS * float(moments.C.trace()):
            return None
        # Rows have nothing along the ones, v, nor may they get it from C; the means m are taken off as n m m^T.
        v, m = spectrum.V[total.d :], (total.mean_h - moments.mean_h)[None] @ axes
        Dv = v * values
        # C = diag(values) + Z^T P in full, and L from its square.
        Z, P = torch.cat([v, Dv, m]), torch.cat([Dv @ v.T @ v - Dv, -v, -total.n * m])
        square = Z.T @ P * (values[:, None] + values) + Z.T @ (P @ Z.T @ P)
        square.diagonal().add_(values.square())
        bound = float(torch.linalg.matrix_norm(square)) ** 0.5
        return cls(axes, values, torch.cat([Dv, m]), torch.cat([v, total.n * m]), bound)

    def times_c(self, Q: torch.Tensor) -> torch.Tensor:
        """Q C."""
        return torch.addmm(Q * self.values, Q @ self.one.T, self.other, alpha=-1)


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
    basis: Basis | None = None,
) -> tuple[torch.Tensor, int]:
    """W' [m, d] with W' W'^T = W W^T, from `start`, and the number of iterations; `basis`: of C, where it is known."""
    if float(moments.C.trace()) <= 0:  # every W' is as good: stay
        return start, 0
    values, vectors = torch.linalg.eigh(W @ W.T)
    kept = values > 1e-10 * values[-1]
    k, rows = values[kept][:, None], vectors[:, kept]  # K = rows diag(sqrt k) rows^T
    root, C, s = k.sqrt(), moments.C, float(moments.C.trace()) / d
    # In the basis of K, Q [r, d] has orthonormal rows, and K is diagonal.
    pull, Q = root * (rows.T @ (W @ moments.S)) + kappa * s * root * (rows.T @ W), rows.T @ start / root
    if basis is None:
        kL = k * float(torch.linalg.matrix_norm(gram(C))) ** 0.5
    else:
        kL, pull, Q = k * basis.bound, pull @ basis.axes, Q @ basis.axes
    twice = -2 * pull

    def reached(Q: torch.Tensor) -> _Point:
        QC = Q @ C if basis is None else basis.times_c(Q)
        return _Point(Q, QC, float(torch.addcmul(twice, k, QC).mul_(Q).sum()))

    def step(point: _Point) -> _Point:
        return reached(_rows_polar(torch.addcmul(pull, kL, point.Q).addcmul_(k, point.QC, value=-1)))

    at = first = reached(Q)
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
    Q = _made_exact(at.Q)
    return rows @ (root * (Q if basis is None else Q @ basis.axes.T)), done


@dataclass(frozen=True, eq=False)
class _Point:
    """Q, Q C, and the objective at Q."""

    Q: torch.Tensor
    QC: torch.Tensor
    value: float

    def beyond(self, before: _Point, share: float) -> _Point:
        """Further along from another point; the objective there is not wanted."""
        Q, QC = (torch.lerp(*pair, 1 + share) for pair in ((before.Q, self.Q), (before.QC, self.QC)))
        return _Point(Q, QC, math.nan)


def _rows_polar(Y: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthonormal rows to Y [r, d]."""
    values, vectors = torch.linalg.eigh(Y @ Y.T)
    if float(values[0]) > _SQUARED * float(values[-1]):
        root: torch.Tensor = vectors / values.sqrt() @ vectors.T
        return root @ Y
    return _by_svd(Y)


def _made_exact(Q: torch.Tensor) -> torch.Tensor:
    """Q [r, d], whose rows are orthonormal but for what is left of it, with rows that are to rounding."""
    defect = Q @ Q.T
    defect.diagonal().sub_(1)
    return Q - defect / 2 @ Q if float(defect.norm()) < _ROUNDED else _by_svd(Q)


def _by_svd(Y: torch.Tensor) -> torch.Tensor:
    U, _, Vt = torch.linalg.svd(Y, full_matrices=False)
    found: torch.Tensor = U @ Vt
    return found


def _facts(kappa: float, steps: int) -> dict[str, float | int | str | bool]:
    return {"kappa": kappa, "steps": steps}
