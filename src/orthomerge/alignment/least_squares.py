"""Ridge regression from merged features to the expert's, with its strength chosen by exact leave-one-out.

With X = [H, a 1] and the residual R = (T - H) W^T that the head sees, all linear aligners are one ridge regression:

    D = argmin ||X D - R||^2 + lambda ||D||^2 = (X^T X + lambda I)^-1 X^T R,     W' = W + D_1..d^T,  b' = b + a D_d+1.

A linear map A = I + (T^T H - C) (C + lambda I)^-1 gives the same head W A. The column of ones, where the head has a
bias, is as large as a typical feature (a).

Leave-one-out costs one decomposition X = U diag(s) V^T for all strengths: the error of input i, fitted without it, is
its residual over 1 - h_i with the leverage h_i = sum_k U_ik^2 s_k^2 / (s_k^2 + lambda). Of all strengths within one
standard error (paired, over inputs) of the best, the largest is taken; infinity, "change nothing", is one.

Letters: H, T [n, d], W [m, d] as in `problem`; C = H^T H; lambda = strength times the mean eigenvalue of X^T X.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.core.errors import RecipeError

STRENGTHS = (math.inf, *(10 ** (power / 2) for power in range(8, -13, -1)))
_TINY = 1e-13  # share of the largest eigenvalue below which one is rounding


@dataclass(frozen=True, eq=False)
class Spectrum:
    """X = U diag(s) V^T without directions of no size; `unit`: mean eigenvalue of X^T X; `a`: size of the ones."""

    U: torch.Tensor
    s: torch.Tensor
    V: torch.Tensor
    unit: float
    a: float

    @classmethod
    def of(cls, H: torch.Tensor, *, biased: bool) -> Spectrum:
        """From the smaller of X^T X and X X^T."""
        n, d = H.shape
        a = float(torch.linalg.vector_norm(H)) / math.sqrt(n * d) if biased else 0.0
        X = torch.cat([H, H.new_full((n, 1), a)], 1) if biased else H
        few = n < X.shape[1]
        values, vectors = torch.linalg.eigh(X @ X.T if few else X.T @ X)
        kept = values > _TINY * values[-1]
        s, basis = values[kept].sqrt(), vectors[:, kept]
        unit = float(values.clamp_min(0).sum()) / X.shape[1]
        return cls(basis, s, X.T @ (basis / s), unit, a) if few else cls(X @ (basis / s), s, basis, unit, a)

    def shrinkage(self, strength: float) -> torch.Tensor:
        """s^2 / (s^2 + lambda), [r]."""
        return torch.zeros_like(self.s) if math.isinf(strength) else self.s**2 / (self.s**2 + strength * self.unit)

    def change(self, R: torch.Tensor, strength: float) -> torch.Tensor:
        """D^T of the ridge regression to R [n, m]: [m, d] or, with a bias, [m, d + 1], the last in units of a."""
        return self.shrinkage(strength) / self.s * (R.T @ self.U) @ self.V.T


def leave_one_out(spectrum: Spectrum, R: torch.Tensor, strength: float) -> torch.Tensor:
    """The error [n, m] of every input under the fit to all others."""
    f = spectrum.shrinkage(strength)
    fitted = spectrum.U @ (f[:, None] * (spectrum.U.T @ R))
    leverage = spectrum.U.square() @ f
    return (R - fitted) / (1 - leverage).clamp_min(1e-9)[:, None]


def chosen_strength(spectrum: Spectrum, R: torch.Tensor) -> float:
    """The strength by leave-one-out; one input alone leaves nothing to judge by, and changes nothing."""
    if len(R) < 2:
        return math.inf
    errors = (leave_one_out(spectrum, R, strength) for strength in STRENGTHS)
    return STRENGTHS[careful(torch.stack([error.square().sum(1) for error in errors]))]


def careful(losses: torch.Tensor) -> int:
    """Of choices [k, n], from careful to bold, the first whose mean over n is within one standard error of the best."""
    excess = losses - losses[int(losses.mean(1).argmin())]
    near = excess.mean(1) <= excess.std(1, correction=1) / math.sqrt(losses.shape[1])
    return int(near.nonzero()[0])


def check_strength(name: str, value: float | Literal["auto"]) -> None:
    """Refuse a strength that is neither 0 or more, infinity for "change nothing", nor `auto`."""
    if value != "auto" and (math.isnan(value) or value < 0):
        raise RecipeError(f"{name!r} must be 0 or more, or auto, got {value!r}")
