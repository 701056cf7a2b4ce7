"""Least squares towards the expert, shrunk towards no change; strength by exact leave-one-out or, from sums, by folds.

With X = [H, a 1] and the residual R = (T - H) W^T that the head sees, all linear aligners are one ridge regression:

    D = argmin ||X D - R||^2 + lambda ||D||^2 = (X^T X + lambda I)^-1 X^T R,     W' = W + D_1..d^T,  b' = b + a D_d+1.

A linear map A = I + (T^T H - C) (C + lambda I)^-1 gives the same head W A: what is learned of directions the head does
not read is lost on it. The column of ones, where the head has a bias, is as large as a typical feature (a).

Leave-one-out is exact and costs one decomposition X = U diag(s) V^T for all strengths: the error of input i, fitted
without it, is its residual over 1 - h_i with the leverage h_i = sum_k U_ik^2 s_k^2 / (s_k^2 + lambda). Of all strengths
within one standard error (paired, over inputs) of the best, the largest is taken; infinity, "change nothing", is one.

Letters: H, T [n, d], W [m, d] as in `problem`; C = H^T H; lambda = strength times the mean eigenvalue of X^T X.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from orthomerge.alignment.folding import centred_rows, first_map
from orthomerge.alignment.rigid import careful, loss_of
from orthomerge.alignment.sums import Sums
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

__all__ = [
    "STRENGTHS",
    "Spectrum",
    "chosen_strength",
    "leave_one_out",
    "linear_map",
    "ridge_change",
    "strength_from_sums",
]

STRENGTHS = (math.inf, *(10 ** (power / 2) for power in range(8, -13, -1)))
_STRIDE = 3
_TINY = 1e-13  # share of the largest eigenvalue below which one is rounding
_FAINT = 1e-8  # strength below which a solve would blow up that rounding: such directions are left out instead


@dataclass(frozen=True, eq=False)
class Spectrum:
    """X = U diag(s) V^T without directions of no size; `unit`: mean eigenvalue of X^T X; `a`: size of the ones."""

    U: torch.Tensor
    s: torch.Tensor
    V: torch.Tensor
    unit: float
    a: float

    @classmethod
    def of(cls, H: torch.Tensor, *, biased: bool, total: Moments | None = None) -> Spectrum:
        """`total`: the sums over the same rows, where they are known."""
        n = len(H)
        a = float(H.square().mean().sqrt()) if biased else 0.0
        X = torch.cat([H, H.new_full((n, 1), a)], 1) if biased else H
        wide = n < X.shape[1]
        if wide or total is None:
            values, vectors = torch.linalg.eigh(X @ X.T if wide else X.T @ X)
        else:
            values, vectors = torch.linalg.eigh(_augmented(total, a=a if biased else None))
        kept = values > _TINY * values[-1]
        s, vectors = values[kept].sqrt(), vectors[:, kept]
        U, V = (vectors, X.T @ vectors / s) if wide else (X @ vectors / s, vectors)
        return cls(U, s, V, float(values.clamp_min(0).sum()) / X.shape[1], a)

    @cached_property
    def squares(self) -> torch.Tensor:
        """U_ik^2."""
        return self.U.square()

    def shrinkage(self, strength: float) -> torch.Tensor:
        """s^2 / (s^2 + lambda), [r]."""
        return torch.zeros_like(self.s) if math.isinf(strength) else self.s**2 / (self.s**2 + strength * self.unit)


def leave_one_out(
    spectrum: Spectrum, R: torch.Tensor, strength: float, *, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """The error [n, m] of every input under the fit to all others; `seen`: U^T R, where it is known."""
    f = spectrum.shrinkage(strength)
    fitted = spectrum.U @ (f[:, None] * (spectrum.U.T @ R if seen is None else seen))
    leverage = spectrum.squares @ f
    return (R - fitted) / (1 - leverage).clamp_min(1e-9)[:, None]


def chosen_strength(spectrum: Spectrum, R: torch.Tensor) -> float:
    """By leave-one-out; one input alone leaves nothing to judge by, and changes nothing.

    Every `_STRIDE`-th strength is tried, then those next to the best, then those just above the largest that is near
    it: as good as trying all of them where errors fall and rise once.
    """
    if len(R) < 2:
        return math.inf
    seen, known = spectrum.U.T @ R, dict[int, torch.Tensor]()
    shrinkage = torch.stack([spectrum.shrinkage(strength) for strength in STRENGTHS])
    left = (1 - spectrum.squares @ shrinkage.T).clamp_min(1e-9).square_().T

    def chosen(places: Iterable[int]) -> tuple[int, int]:
        """With some more strengths, the place of the best, and of the largest within one standard error of it."""
        for place in {*places} & {*range(len(STRENGTHS))} - {*known}:
            error = torch.addmm(R, spectrum.U, shrinkage[place][:, None] * seen, alpha=-1)
            known[place] = error.square_().sum(1).div_(left[place])
        tried = sorted(known)
        losses = torch.stack([known[place] for place in tried])
        return tried[int(losses.mean(1).argmin())], tried[careful(losses)]

    best, _ = chosen(range(0, len(STRENGTHS), _STRIDE))
    _, found = chosen(range(best - _STRIDE + 1, best + _STRIDE))
    return STRENGTHS[chosen(range(found - _STRIDE + 1, found))[1]]


def ridge_change(spectrum: Spectrum, R: torch.Tensor, strength: float) -> torch.Tensor:
    """D^T [m, d] or, with a bias, [m, d + 1]; the last column is in units of a."""
    f = spectrum.shrinkage(strength) / spectrum.s
    return (spectrum.V @ (f[:, None] * (spectrum.U.T @ R))).T


def linear_map(
    moments: Moments, strength: float, W: torch.Tensor | None = None, *, biased: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A [d, d] and, with a bias, the shift [d] of the ridge regression from H to T, shrunk towards (I, 0).

    Of a head W [m, d], what it reads of them, W A and W shift, at the price of m right-hand sides instead of d.
    """
    a = _column(moments) if biased else None
    C, change = _augmented(moments, a=a), _change(moments, W, a=a)
    d, size = moments.d, len(C)
    start = torch.eye(d, dtype=C.dtype, device=C.device) if W is None else W
    if math.isinf(strength) or float(C.trace()) <= 0:
        return start, torch.zeros_like(change[:, 0]) if biased else None
    penalty = strength * float(C.trace()) / size
    if strength > _FAINT:
        C.diagonal().add_(penalty)
        D = torch.cholesky_solve(change.T, torch.linalg.cholesky(C)).T
    else:
        values, vectors = torch.linalg.eigh(C)
        kept = values > _TINY * values[-1]
        D = change @ vectors[:, kept] / (values[kept] + penalty) @ vectors[:, kept].T
    return start + D[:, :d], None if a is None else a * D[:, d]


def strength_from_sums(sums: Sums, head: Head) -> float:
    """By cross-validation over the folds of the sums."""
    W, biased = centred_rows(head), first_map(head).bias is not None
    rows: list[list[float]] = []
    for train, held_out in sums.splits():
        a, losses = _column(train), list[float]()
        C = _augmented(train, a=a if biased else None)
        values, vectors = torch.linalg.eigh(C)
        seen, unit = _change(train, W, a=a if biased else None) @ vectors, float(C.trace()) / len(C)
        for strength in STRENGTHS:
            none = math.isinf(strength) or unit <= 0
            weights = torch.zeros_like(values) if none else 1 / (values.clamp_min(0) + strength * unit)
            D = seen * weights @ vectors.T
            shift = a * D[:, sums.total.d] if biased else torch.zeros_like(D[:, 0])
            losses.append(loss_of(W + D[:, : sums.total.d], shift, W, held_out) / held_out.n)
        rows.append(losses)
    return STRENGTHS[careful(torch.tensor(rows, dtype=torch.float64).T)] if len(rows) > 1 else math.inf


def _column(moments: Moments) -> float:
    """a: the size of a typical feature."""
    return math.sqrt(max(float(moments.C.trace()), 0.0) / (moments.n * moments.d))


def _augmented(moments: Moments, *, a: float | None) -> torch.Tensor:
    """X^T X, of which nobody else has a copy; `a`: the size of the ones, if there are any."""
    if a is None:
        return moments.C.clone()
    side, corner = a * moments.sum_h[:, None], moments.C.new_full((1, 1), a * a * moments.n)
    return torch.cat([torch.cat([moments.C, side], 1), torch.cat([side.T, corner], 1)])


def _change(moments: Moments, W: torch.Tensor | None, *, a: float | None) -> torch.Tensor:
    """(T - H)^T X [d, .] or W times it."""
    inner, shift = moments.S - moments.C, moments.sum_t - moments.sum_h
    if W is not None:
        inner, shift = W @ inner, W @ shift
    return inner if a is None else torch.cat([inner, a * shift[:, None]], 1)
