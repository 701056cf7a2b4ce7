"""The orthogonal map from merged to expert features, with a prior that keeps what was never seen where it is.

Schönemann 1966 for Procrustes: of all orthogonal A the one that minimises sum ||A h - t||^2 is polar(S), S = sum t h^T.
A matrix-Langevin prior, p(A) proportional to exp(kappa s tr A), makes it

    A = polar(S + kappa s I),   s = tr(C) / d:

kappa = 0 is Procrustes, whose map is arbitrary where there were no inputs; kappa = infinity is the identity. A tiny
kappa is Procrustes with the identity for whatever it leaves open.

kappa and how much of the shift of the means is believed are chosen together by cross-validation: the mean squared error
of the first linear map's outputs on held-out inputs, of which every fold's sums know everything but a constant. Of all
choices within one standard error (over folds) of the best, the most careful is taken; "change nothing" is one of them.
Wide features are looked at through their `_LEADING` leading directions for this choice, not for the map itself.

Letters: h, t what the head reads of merged and expert encoder; C = sum h h^T, S [d, d]; W [m, d] the first linear map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.alignment.folding import centred_rows, first_map
from orthomerge.alignment.sums import Sums
from orthomerge.errors import NumericalError
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

__all__ = ["KAPPAS", "Rigid", "careful", "choose_rigid", "loss_of", "polar_factor", "scale_of", "spread", "turn_of"]

KAPPAS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.01, 1e-4)
_SHIFTS = (0.0, 0.5, 1.0)
_LEADING = 96
_SQUARED = 1e-8  # condition from which X^T X is enough for six digits
_ROUNDING = 1e-12  # share of the sums below which what is left without the means is rounding


@dataclass(frozen=True)
class Rigid:
    """x is mapped to scale A x + shift; `kappa` and `share` (of the shift that was believed) are what was chosen."""

    A: torch.Tensor
    scale: float
    shift: torch.Tensor | None
    kappa: float
    share: float


def polar_factor(X: torch.Tensor, *, task: str) -> torch.Tensor:
    """The orthogonal matrix nearest to X, by SVD."""
    try:
        U, _, Vt = torch.linalg.svd(X, full_matrices=False)
    except RuntimeError as error:  # torch.linalg.LinAlgError, which torch does not export to type checkers
        raise NumericalError(f"an SVD for the map of {task!r} did not converge; use the aligner 'ridge'") from error
    factor: torch.Tensor = U @ Vt
    return factor


def turn_of(moments: Moments, kappa: float, *, d: int, task: str, rough: bool = False) -> torch.Tensor:
    """A [r, r] for sums over rows of width r, of features that are d wide; `rough`: to six digits or so."""
    C, energy = moments.C, float(moments.C.trace())
    eye = torch.eye(len(C), dtype=C.dtype, device=C.device)
    if math.isinf(kappa) or energy <= 0:
        return eye
    X = moments.S + kappa * energy / d * eye
    if rough:
        values, V = torch.linalg.eigh(X.T @ X)
        if float(values[0]) > _SQUARED * float(values[-1]):
            near: torch.Tensor = (X @ V / values.sqrt()) @ V.T
            return near
    return polar_factor(X, task=task)


def scale_of(A: torch.Tensor, moments: Moments, kappa: float) -> float:
    """The scale that goes with A, shrunk towards 1 as A is towards the identity."""
    energy = float(moments.C.trace())
    if math.isinf(kappa) or energy <= 0:
        return 1.0
    return (float((A * moments.S).sum()) + kappa * energy) / ((1 + kappa) * energy)


def spread(moments: Moments) -> Moments:
    """The sums without the means, and exactly zero for inputs that are all the same: rounding has no direction."""
    found = moments.centred()
    if float(found.C.trace()) > _ROUNDING * float(moments.C.trace()):
        return found
    return Moments(found.n, found.sum_h, found.sum_t, torch.zeros_like(found.C), torch.zeros_like(found.S), found.tt)


def loss_of(B: torch.Tensor, c: torch.Tensor, W: torch.Tensor, held_out: Moments) -> float:
    """Sum of ||B h + c - W t||^2 over held-out rows, but for the part that only depends on t."""
    linear = B @ held_out.sum_h - W @ held_out.sum_t
    squares = (B @ held_out.C * B).sum() - 2 * (B * (W @ held_out.S)).sum()
    return float(squares + 2 * c @ linear + held_out.n * c @ c)


def choose_rigid(sums: Sums, head: Head, *, kappa: float | Literal["auto"], bias: bool, scaled: bool = False) -> Rigid:
    """The map with a given kappa and the whole shift or, with `auto`, with what held-out inputs say of both.

    `bias`: with a shift, if the head has a bias that can take it up.
    """
    total, W = sums.total, centred_rows(head)
    bias = bias and first_map(head).bias is not None
    if kappa == "auto":
        choices = [(each, share) for each in KAPPAS for share in (_SHIFTS if bias else (0.0,))]
        chosen, share = _cross_validated(sums, W, choices, bias=bias, scaled=scaled)
    else:
        chosen, share = kappa, 1.0 if bias else 0.0
    moments = spread(total) if bias else total
    A = sums.once(("turn", chosen, bias), lambda: turn_of(moments, chosen, d=total.d, task=sums.task))
    scale = scale_of(A, moments, chosen) if scaled else 1.0
    shift = share * (total.mean_t - scale * A @ total.mean_h) if bias else None
    return Rigid(A, scale, shift, chosen, share)


def _cross_validated(
    sums: Sums, W: torch.Tensor, choices: list[tuple[float, float]], *, bias: bool, scaled: bool
) -> tuple[float, float]:
    """The first of the choices, which go from careful to bold, that is within one standard error of the best."""
    d, seen = sums.total.d, W
    part = sums
    if d > _LEADING:
        Q = sums.once("leading", lambda: _leading(sums.total))
        part = sums.once("led", lambda: Sums(tuple(each.seen_through(Q) for each in sums.parts), sums.task))
        seen = W @ Q
    losses: list[list[float]] = []
    for number, (train, held_out) in enumerate(part.splits()):
        moments = spread(train) if bias else train
        wanted, sum_t, mean_t = seen @ held_out.S, seen @ held_out.sum_t, seen @ train.mean_t
        row = dict[tuple[float, float], float]()
        for kappa in dict.fromkeys(each for each, _ in choices):
            A = _fold_turn(sums, moments, kappa, key=(number, bias))
            B = (scale_of(A, moments, kappa) if scaled else 1.0) * seen @ A
            c, gap = mean_t - B @ train.mean_h, B @ held_out.sum_h - sum_t
            # `loss_of`, whose shift is a share of c.
            fixed, once, twice = (B @ held_out.C * B - 2 * B * wanted).sum(), 2 * c @ gap, held_out.n * c @ c
            found = torch.stack([fixed, once, twice]).tolist()
            for share in _SHIFTS:
                row[kappa, share] = (found[0] + share * found[1] + share**2 * found[2]) / held_out.n
        losses.append([row[choice] for choice in choices])
    if len(losses) < 2:  # one input: nothing to choose by
        return choices[0]
    return choices[careful(torch.tensor(losses, dtype=torch.float64).T)]


def _fold_turn(sums: Sums, moments: Moments, kappa: float, *, key: tuple[int, bool]) -> torch.Tensor:
    """A without one of the folds; aligners that differ in scale or shift share it."""
    return sums.once(("fold", kappa, *key), lambda: turn_of(moments, kappa, d=sums.total.d, task=sums.task, rough=True))


def careful(losses: torch.Tensor) -> int:
    """Of choices [k, n], from careful to bold, the first whose mean over n is within one standard error of the best."""
    excess = losses - losses[int(losses.mean(1).argmin())]
    spread = excess.std(1, correction=1) / math.sqrt(losses.shape[1])
    return int((excess.mean(1) <= spread).nonzero()[0])


def _leading(total: Moments) -> torch.Tensor:
    """An orthonormal basis [d, r] of the directions along which both encoders' features lie most."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(total.d, _LEADING // 2, generator=generator, dtype=torch.float64).to(total.C.device)
    one, other = total.C @ start, total.S @ start
    for _ in range(2):
        one, other = total.C @ torch.linalg.qr(one)[0], total.S @ (total.S.T @ torch.linalg.qr(other)[0])
    basis: torch.Tensor = torch.linalg.qr(torch.cat([one, other], 1))[0]
    return basis
