"""Newton's method for the divergence from an expert's outputs with a Gaussian prior: see `kl_map`.

    minimise over G    sum_i KL(q_i || softmax(logits(b_i + G x_i)))  +  lambda / 2 ||G||^2

Steps solve (B + lambda I) d = -gradient roughly, by conjugate gradients, where B is the Gauss-Newton matrix: for a head
of one layer the Hessian. They are halved until the objective decreases sufficiently (Armijo).

Curvature differs widely between inputs and classes, so gradients are preconditioned class by class (or hidden unit by
hidden unit): the `_PAIRS` largest curvatures w_ij of input i at class j count with their input, M_j = diag(D_j) +
sum_i w_ij x_i x_i^T, and the others along the axes of the basis alone, D_j = lambda + sum of what is left of w_j times
the mean square of x along each axis.

Letters: X [n, r] inputs x_i, b [n, m] the outputs of the head's first map, q [n, C] the expert's probabilities, G
[m, r]; p [n, C] the head's probabilities, a [n, m] slopes of its activation, w [n, m].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import log_softmax

from orthomerge.alignment.folding import logits_after
from orthomerge.models.heads import Head

_PAIRS = 4  # per input
_FAINT = 1e-7  # curvatures below this are never counted with their input
_INNER = 0.3  # share of the gradient, in the preconditioner's norm, that a step may leave
_MOST = 500  # inner iterations
_STALE = 15  # inner iterations above which the next step computes a new preconditioner
_NOTHING = 1e-14  # divergence per input that is rounding
_ROOM = 1 << 28  # numbers that a GPU's preconditioner may hold
_CLASSES = 16  # classes whose blocks it inverts at once

_Preconditioner = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Fit:
    """G and the objective at the end of the method, whether it converged, and its number of steps."""

    G: torch.Tensor
    value: float
    converged: bool
    steps: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs X, the first map's outputs b for them (`base`), and log q (`target`)."""

    X: torch.Tensor
    base: torch.Tensor
    target: torch.Tensor
    head: Head

    def take(self, rows: torch.Tensor) -> Rows:
        return Rows(self.X[rows], self.base[rows], self.target[rows], self.head)

    def divergence(self, G: torch.Tensor) -> torch.Tensor:
        """KL [n] from the expert's outputs."""
        return self._divergence(self.base + self.X @ G.T)

    def best(self, starts: Sequence[torch.Tensor], prior: float) -> torch.Tensor:
        return min(starts, key=lambda G: self._value(self.base + self.X @ G.T, G, prior))

    def expanded(self, prior: float, start: torch.Tensor) -> torch.Tensor:
        """Minimise roughly the objective's expansion at the expert's outputs, for a head of one layer."""
        local = _Local(self, self.target, prior)
        gap = self.base + self.X @ start.T - self.target
        gradient = local.hessian_times(gap).T @ self.X + prior * start
        return start + _conjugate(local.times, local.preconditioner(), gradient, share=_INNER / 3)[0]

    def minimised(self, prior: float, start: torch.Tensor, *, tolerance: float, steps: int) -> Fit:
        """Minimise until the predicted decrease of a step is below a share `tolerance` of the objective."""
        # Softmax ignores changes common to all classes, and the minimum has none.
        G = start if self.head.hidden is not None else start - start.mean(0)
        first = self.base + self.X @ G.T
        value, q = self._value(first, G, prior), self.target.exp()
        solve: _Preconditioner | None = None
        for done in range(steps):
            local = _Local(self, first, prior)
            gradient = local.backpropagated(local.p - q).T @ self.X + prior * G
            solve = solve or local.preconditioner()
            d, iterations = _conjugate(local.times, solve, gradient)
            promised = -float((gradient * d).sum())
            if not promised > 2 * _NOTHING * len(first):
                return Fit(G, value, True, done)
            size, moved = 1.0, self.X @ d.T
            while not (new := self._value(first + size * moved, G + size * d, prior)) <= (
                value - 1e-4 * size * promised
            ):
                size /= 2
                if size < 1e-9:  # rounding
                    return Fit(G, value, promised <= 2 * tolerance * value, done)
            G, first, value = G + size * d, first + size * moved, new
            if promised <= 2 * tolerance * value:
                return Fit(G, value, True, done + 1)
            if iterations > _STALE:
                solve = None
        return Fit(G, value, False, steps)

    def _value(self, first: torch.Tensor, G: torch.Tensor, prior: float) -> float:
        return float(self._divergence(first).sum()) + prior / 2 * float(G.square().sum())

    def _divergence(self, first: torch.Tensor) -> torch.Tensor:
        return (self.target.exp() * (self.target - log_softmax(logits_after(self.head, first), 1))).sum(1)


class _Local:
    def __init__(self, rows: Rows, first: torch.Tensor, prior: float) -> None:
        self._rows, self._prior = rows, prior
        self.p = logits_after(rows.head, first).softmax(1)
        head = rows.head
        self._slopes: torch.Tensor | None = None
        if head.hidden is not None and head.activation is not None:
            at = first.detach().requires_grad_()
            values = getattr(torch.nn.functional, head.activation)(at)
            (self._slopes,) = torch.autograd.grad(values.sum(), at)
            self._output = head.output.weight.double()

    def backpropagated(self, error: torch.Tensor) -> torch.Tensor:
        """Gradient in the first map's outputs [n, m] from that in the logits [n, C]."""
        return error if self._slopes is None else error @ self._output * self._slopes

    def times(self, v: torch.Tensor) -> torch.Tensor:
        """(B + lambda I) v, [m, r]."""
        z = (v @ self._rows.X.T).T
        if self._slopes is not None:
            z = (z * self._slopes) @ self._output.T
        return torch.addmm(v, self.backpropagated(self.hessian_times(z)).T, self._rows.X, beta=self._prior)

    def hessian_times(self, z: torch.Tensor) -> torch.Tensor:
        """Hessian of the divergence in the logits, times z [n, C]."""
        z = self.p * z
        return z.sub_(self.p * z.sum(1, keepdim=True))

    def curvatures(self) -> torch.Tensor:
        """Curvatures w [n, m]."""
        if self._slopes is None:
            return self.p - self.p.square()
        spread = self.p @ self._output.square() - (self.p @ self._output).square()
        return spread.clamp_min(0) * self._slopes.square()

    def preconditioner(self) -> _Preconditioner:
        """Function that multiplies gradients [m, r] by the inverses of M_j."""
        X, w, most = self._rows.X, self.curvatures(), _PAIRS * len(self._rows.X)
        counted = w > (max(_FAINT, float(w.flatten().topk(most).values[-1])) if w.numel() > most else _FAINT)
        left = torch.where(counted, 0.0, w).sum(0)
        D = (self._prior + left[:, None] * X.square().mean(0)).sqrt()
        if X.is_cuda and D.numel() * X.shape[1] <= _ROOM:
            return self._whole(D.square(), torch.where(counted, w, 0.0))
        places = [rows.nonzero().flatten() for rows in counted.T]
        blocks = [_block(X[rows] * w[rows, j, None].sqrt() / D[j]) for j, rows in enumerate(places)]

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            scaled = gradient / D
            for (L, whole), row in zip(blocks, scaled, strict=True):
                product = torch.mv(L, row)
                if whole:
                    row.copy_(product)
                else:
                    row.sub_(torch.mv(L.T, product))
            return self._centred(scaled.div_(D))

        return solve

    def _whole(self, D: torch.Tensor, w: torch.Tensor) -> _Preconditioner:
        """Preconditioner from the inverses of all M_j, faster on a GPU; D [m, r] is not a root here."""
        X = self._rows.X
        parts = []
        for some, diagonal in zip(torch.split(w.T, _CLASSES), torch.split(D, _CLASSES), strict=True):
            M = (X.T * some[:, None]) @ X
            M.diagonal(dim1=1, dim2=2).add_(diagonal)
            parts.append(torch.cholesky_inverse(torch.linalg.cholesky(M)))
        inverse = torch.cat(parts)

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            return self._centred(torch.bmm(inverse, gradient[:, :, None])[:, :, 0])

        return solve

    def _centred(self, change: torch.Tensor) -> torch.Tensor:
        return change if self._slopes is not None else change - change.mean(0)


def _conjugate(
    times: Callable[[torch.Tensor], torch.Tensor],
    solve: _Preconditioner,
    gradient: torch.Tensor,
    *,
    share: float = _INNER,
) -> tuple[torch.Tensor, int]:
    """Solve (B + lambda I) d = -gradient up to a share of it; return d and the number of iterations."""
    d, r = torch.zeros_like(gradient), -gradient
    v = y = solve(r)
    size = enough = float((r * y).sum())
    done = 0
    while done < _MOST and size > share**2 * enough:
        Bv = times(v)
        curvature = float((v * Bv).sum())
        if not curvature > 0:  # rounding
            break
        d, r = d + size / curvature * v, r - size / curvature * Bv
        y = solve(r)
        size, before = float((r * y).sum()), size
        v = y + size / before * v
        done += 1
    return d, done


def _block(Y: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """L such that the inverse of I + Y^T Y is I - L^T L or, where Y has more rows than columns, L itself (true)."""
    whole = len(Y) > Y.shape[1]
    A = Y.T @ Y if whole else Y @ Y.T
    A.diagonal().add_(1.0)
    factor = torch.linalg.cholesky(A)
    if whole:
        return torch.cholesky_inverse(factor), True
    return torch.linalg.solve_triangular(factor, Y, upper=False), False
