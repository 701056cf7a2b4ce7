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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from orthomerge.alignment.folding import centred_rows, first_map
from orthomerge.alignment.gram import gram
from orthomerge.alignment.rigid import careful, loss_of
from orthomerge.alignment.sums import Sums
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

__all__ = [
    "STRENGTHS",
    "Spectrum",
    "chosen_strength",
    "factor_once",
    "leave_one_out",
    "linear_map",
    "ridge_change",
    "strength_from_sums",
]

STRENGTHS = (math.inf, *(10 ** (power / 2) for power in range(8, -13, -1)))
_STRIDE = 3
_HOPELESS = 2.0  # times the error of another strength, from which one is not worth a try
_CLOSE, _HELD = 3e-4, 0.05  # least error, as a share of the residual, and 1 - h_i, for single precision
_ROWS = 384  # of one product: enough for it to be fast, few enough to stay near
_TINY = 1e-13  # share of the largest eigenvalue below which one is rounding
_FAINT = 1e-8  # strength below which a solve would blow up that rounding: such directions are left out instead


@dataclass(frozen=True, eq=False)
class Spectrum:
    """X = U diag(s) V^T without directions of no size; `unit`: mean eigenvalue of X^T X; `a`: size of the ones.

    `of_rows`: U, where it was found first, since there are fewer inputs than features.
    """

    H: torch.Tensor
    s: torch.Tensor
    V: torch.Tensor
    unit: float
    a: float
    of_rows: torch.Tensor | None = None

    @classmethod
    def of(cls, H: torch.Tensor, *, biased: bool, total: Moments | None = None) -> Spectrum:
        """`total`: the sums over the same rows, where they are known."""
        n, d = H.shape
        a, size = float(torch.linalg.vector_norm(H)) / math.sqrt(n * d) if biased else 0.0, d + biased
        if n < size:
            X = torch.cat([H, H.new_full((n, 1), a)], 1) if biased else H
            values, vectors = torch.linalg.eigh(gram(X.T))
        else:
            C, sum_h = (gram(H), H.sum(0)) if total is None else (total.C, total.sum_h)
            values, vectors = torch.linalg.eigh(_bordered(C, sum_h, n, a=a) if biased else C)
        first = int((values <= _TINY * values[-1]).sum())  # they rise
        s, vectors = values[first:].sqrt(), vectors[:, first:]
        unit = float(values.clamp_min(0).sum()) / size
        return cls(H, s, X.T @ (vectors / s), unit, a, vectors) if n < size else cls(H, s, vectors, unit, a)

    @cached_property
    def U(self) -> torch.Tensor:  # noqa: N802 - the letter of the legend
        """[n, r]."""
        if self.of_rows is not None:
            return self.of_rows
        # X is not put together: its last column is the same for all inputs.
        scaled, d = self.V / self.s, self.H.shape[1]
        return self.H @ scaled if len(scaled) == d else torch.addmm(self.a * scaled[d], self.H, scaled[:d])

    @cached_property
    def rough(self) -> torch.Tensor:
        """U^T [r, n] in single precision."""
        scaled, H, d = self.V.float() / self.s.float(), self.H.float(), self.H.shape[1]
        turned = scaled[:d].T @ H.T
        return turned if len(scaled) == d else turned.add_(self.a * scaled[d, :, None])

    @cached_property
    def squares(self) -> torch.Tensor:
        """U_ik^2."""
        return self.U.square()

    def seen(self, R: torch.Tensor) -> torch.Tensor:
        """U^T R [r, m] of R [n, m], without U."""
        XR = R.T @ self.H
        if len(self.V) > self.H.shape[1]:
            XR = torch.cat([XR, self.a * R.sum(0)[:, None]], 1)
        return (XR @ self.V / self.s).T

    def shrinkage(self, strength: float) -> torch.Tensor:
        """s^2 / (s^2 + lambda), [r]."""
        return torch.zeros_like(self.s) if math.isinf(strength) else self.s**2 / (self.s**2 + strength * self.unit)


def leave_one_out(
    spectrum: Spectrum, R: torch.Tensor, strength: float, *, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """The error [n, m] of every input under the fit to all others; `seen`: U^T R, where it is known."""
    f = spectrum.shrinkage(strength)
    fitted = spectrum.U @ (f[:, None] * (spectrum.seen(R) if seen is None else seen))
    leverage = spectrum.squares @ f
    return (R - fitted) / (1 - leverage).clamp_min(1e-9)[:, None]


def chosen_strength(spectrum: Spectrum, R: torch.Tensor, *, seen: torch.Tensor | None = None) -> float:
    """By leave-one-out; one input alone leaves nothing to judge by, and changes nothing. `seen`: U^T R, where known.

    Every `_STRIDE`-th strength is tried, then those next to the best, then those just above the largest that is near
    it: as good as trying all of them where errors fall and rise once. Single precision is enough to tell them apart
    unless fits are so close that it could not tell what they miss.
    """
    if len(R) < 2:
        return math.inf
    seen_t = (spectrum.seen(R) if seen is None else seen).T
    if spectrum.of_rows is None:
        found = _tried(spectrum, spectrum.rough, R.T, seen_t)
        if found.sure:
            return found.strength
    return _tried(spectrum, spectrum.U.T, R.T, seen_t).strength


@dataclass(frozen=True)
class _Tried:
    """`sure`: whether errors are large enough for single precision."""

    strength: float
    sure: bool


def _tried(spectrum: Spectrum, U_t: torch.Tensor, R_t: torch.Tensor, seen_t: torch.Tensor) -> _Tried:
    """In the precision of U^T [r, n]; R^T [m, n], seen^T [m, r].

    Few rows times many columns is the fast way round for a product: all is transposed.
    """
    R_t = R_t.to(U_t.dtype).contiguous()
    sizes = R_t.square().sum(0, dtype=torch.float64)
    shrinkage = torch.stack([spectrum.shrinkage(strength) for strength in STRENGTHS])
    left = (1 - (shrinkage.to(U_t.dtype) @ U_t.square()).double()).clamp_min_(1e-9).square_()
    known = {0: sizes}  # infinity: nothing is fitted

    def chosen(places: Iterable[int]) -> tuple[int, int]:
        """With some more strengths, the place of the best, and of the largest within one standard error of it."""
        new, at_once = sorted({*places} & {*range(len(STRENGTHS))} - {*known}), max(1, _ROWS // len(R_t))
        for some in (new[start : start + at_once] for start in range(0, len(new), at_once)):
            fitted = (shrinkage[some][:, None] * seen_t).flatten(0, 1).to(U_t.dtype) @ U_t
            error = fitted.view(len(some), *R_t.shape).sub_(R_t)
            known.update(zip(some, error.square_().sum(1, dtype=torch.float64).div_(left[some]), strict=True))
        tried = sorted(known)
        losses = torch.stack([known[place] for place in tried])
        return tried[int(losses.mean(1).argmin())], tried[careful(losses)]

    # From what fits miss of inputs that they have seen: about what leave-one-out will say, and the least that it can.
    missed = (sizes.sum() - shrinkage * (2 - shrinkage) @ seen_t.square().sum(0)) / len(sizes)
    about, least = (missed / left.mean(1)).tolist(), (missed / left.amax(1)).tolist()
    coarse = range(0, len(STRENGTHS), _STRIDE)
    first, _ = chosen([min(coarse, key=about.__getitem__)])
    bar = _HOPELESS * float(known[first].mean()) + _TINY * float(sizes.mean())
    best, _ = chosen(place for place in coarse if least[place] <= bar)
    _, found = chosen(range(best - _STRIDE + 1, best + _STRIDE))
    best, found = chosen(range(found - _STRIDE + 1, found))
    sure = float(known[best].mean()) > _CLOSE**2 * float(sizes.mean()) and float(left.min()) > _HELD**2
    return _Tried(STRENGTHS[found], sure)


def ridge_change(
    spectrum: Spectrum, R: torch.Tensor, strength: float, *, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """D^T [m, d] or, with a bias, [m, d + 1]; the last column is in units of a. `seen`: U^T R, where it is known."""
    f = spectrum.shrinkage(strength) / spectrum.s
    return f * (spectrum.seen(R) if seen is None else seen).T @ spectrum.V.T


def linear_map(
    moments: Moments,
    strength: float,
    W: torch.Tensor | None = None,
    *,
    biased: bool,
    spectrum: Spectrum | None = None,
    factor: Callable[[Callable[[], torch.Tensor]], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A [d, d] and, with a bias, the shift [d] of the ridge regression from H to T, shrunk towards (I, 0).

    Of a head W [m, d], what it reads of them, W A and W shift, at the price of m right-hand sides instead of d.
    `spectrum`: of the same rows, with a column of ones if `biased`, where it is known; `factor`: gives Cholesky's of
    what it can have made, for those who solve more than once.
    """
    a = _column(moments) if biased else None
    energy, change = _energy(moments, a=a), _change(moments, W, a=a)
    d, penalty = moments.d, strength * energy / (moments.d + biased)

    def shrunk() -> torch.Tensor:
        C = _augmented(moments, a=a)
        C.diagonal().add_(penalty)
        return C

    if math.isinf(strength) or energy <= 0:
        D = torch.zeros_like(change)
    elif spectrum is not None:
        D = change @ spectrum.V / (spectrum.s.square() + penalty) @ spectrum.V.T
    elif strength > _FAINT:
        L = torch.linalg.cholesky(shrunk()) if factor is None else factor(shrunk)
        half = torch.linalg.solve_triangular(L.T, change, upper=True, left=False)
        D = torch.linalg.solve_triangular(L, half, upper=False, left=False)
    else:
        values, vectors = torch.linalg.eigh(_augmented(moments, a=a))
        kept = values > _TINY * values[-1]
        D = change @ vectors[:, kept] / (values[kept] + penalty) @ vectors[:, kept].T
    if W is None:
        D[:, :d].diagonal().add_(1)
        return D[:, :d], None if a is None else a * D[:, d]
    return W + D[:, :d], None if a is None else a * D[:, d]


def factor_once(sums: Sums, strength: float, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Cholesky's factor for a `linear_map` without ones: one for all aligners with these sums."""
    factor: torch.Tensor = sums.once(("factor", strength), lambda: torch.linalg.cholesky(make()))
    return factor


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


def _energy(moments: Moments, *, a: float | None) -> float:
    """tr(X^T X)."""
    return float(moments.C.trace()) + (a * a * moments.n if a else 0.0)


def _augmented(moments: Moments, *, a: float | None) -> torch.Tensor:
    """X^T X, of which nobody else has a copy; `a`: the size of the ones, if there are any."""
    if a is None:
        return moments.C.clone()
    return _bordered(moments.C, moments.sum_h, moments.n, a=a)


def _bordered(C: torch.Tensor, sum_h: torch.Tensor, n: int, *, a: float) -> torch.Tensor:
    """X^T X with the column of ones."""
    found = torch.nn.functional.pad(C, (0, 1, 0, 1), value=a * a * n)
    found[-1, :-1] = found[:-1, -1] = a * sum_h
    return found


def _change(moments: Moments, W: torch.Tensor | None, *, a: float | None) -> torch.Tensor:
    """(T - H)^T X [d, .] or W times it."""
    inner, shift = moments.S - moments.C, moments.sum_t - moments.sum_h
    if W is not None:
        inner, shift = W @ inner, W @ shift
    return inner if a is None else torch.cat([inner, a * shift[:, None]], 1)
