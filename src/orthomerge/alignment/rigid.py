"""The orthogonal map from merged to expert features, with a prior that keeps what was never seen where it is.

Schönemann 1966 for Procrustes: of all orthogonal A the one that minimises sum ||A h - t||^2 is polar(S), S = sum t h^T.
A matrix-Langevin prior, p(A) proportional to exp(kappa s tr A), makes it

    A = polar(S + kappa s I),   s = tr(C) / d:

kappa = 0 is Procrustes, whose map is arbitrary where there were no inputs; kappa = infinity is the identity. A tiny
kappa is Procrustes with the identity for whatever it leaves open.

kappa and how much of the shift of the means is believed are chosen together by cross-validation: the mean squared error
of the first linear map's outputs on held-out inputs, of which every fold's sums know everything but a constant. Of all
choices within one standard error (over folds) of the best, the most careful is taken; "change nothing" is one of them.
Wide features are looked at through their `_LEADING` leading directions, and roughly, for this choice, not for the map
itself; nor is A multiplied out for a head that reads few of its rows (`polar`).

Letters: h, t what the head reads of merged and expert encoder; C = sum h h^T, S [d, d]; W [m, d] the first linear map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import torch

from orthomerge.alignment.folding import centred_rows, first_map, with_first_map
from orthomerge.alignment.polar import Polar, polar_factor
from orthomerge.alignment.sums import Sums
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

__all__ = [
    "KAPPAS",
    "Rigid",
    "careful",
    "choose_rigid",
    "loss_of",
    "polar_factor",
    "scale_of",
    "seen_by",
    "spread",
    "turn_of",
]

KAPPAS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.01, 1e-4)
_SHIFTS = (0.0, 0.5, 1.0)
_LEADING = 96
_SQUARED = 1e-8  # condition of X^T X from which its eigenvectors are enough for six digits
_ROUNDING = 1e-12  # share of the sums below which what is left without the means is rounding


@dataclass(frozen=True)
class Rigid:
    """x is mapped to scale A x + shift; `kappa` and `share` (of the shift that was believed) are what was chosen.

    `read`: W A, what the head's first linear map reads of A; `means`: of h and t, if there is a shift.
    """

    polar: Polar
    read: torch.Tensor
    scale: float
    means: tuple[torch.Tensor, torch.Tensor] | None
    kappa: float
    share: float

    @property
    def A(self) -> torch.Tensor:  # noqa: N802 - the letter of the legend
        """The orthogonal map itself."""
        return self.polar.A

    @property
    def shift(self) -> torch.Tensor | None:
        """As far as it was believed, the means are moved onto each other."""
        return None if self.means is None else self.share * (self.means[1] - self.scale * self.A @ self.means[0])

    def folded_into(self, head: Head, *, task: str) -> Head:
        """The head that reads x as `head` reads scale A x + shift."""
        first, weight = first_map(head), self.scale * self.read
        bias = None if first.bias is None else first.bias.double()
        if bias is not None and self.means is not None:
            bias = bias + self.share * (first.weight.double() @ self.means[1] - weight @ self.means[0])
        return with_first_map(head, weight, bias, task=task)


def turn_of(moments: Moments, kappa: float, *, d: int, task: str) -> Polar:
    """A [r, r] for sums over rows of width r, of features that are d wide."""
    energy, X = float(moments.C.trace()), moments.S.clone()
    still = math.isinf(kappa) or energy <= 0
    if not still:
        X.diagonal().add_(kappa * energy / d)
    return Polar(X, task, still)


def scale_of(along: float, energy: float, kappa: float) -> float:
    """The scale that goes with A, shrunk towards 1 as A is towards the identity; from tr(A^T S) and tr(C)."""
    return 1.0 if math.isinf(kappa) or energy <= 0 else (along + kappa * energy) / ((1 + kappa) * energy)


def spread(moments: Moments) -> Moments:
    """The sums without the means, and exactly zero for inputs that are all the same: rounding has no direction."""
    found = moments.centred()
    if float(found.C.trace()) > _ROUNDING * float(moments.C.trace()):
        return found
    return Moments(found.n, found.sum_h, found.sum_t, torch.zeros_like(found.C), torch.zeros_like(found.S), found.tt)


def seen_by(sums: Sums, *, bias: bool) -> Moments:
    """The sums from which a map is made: without the means, if there is a bias for these."""
    return sums.once("spread", lambda: spread(sums.total)) if bias else sums.total


def loss_of(B: torch.Tensor, c: torch.Tensor, W: torch.Tensor, held_out: Moments) -> float:
    """Sum of ||B h + c - W t||^2 over held-out rows, but for the part that only depends on t."""
    linear = B @ held_out.sum_h - W @ held_out.sum_t
    squares = (B @ held_out.C * B).sum() - 2 * (B * (W @ held_out.S)).sum()
    return float(squares + 2 * c @ linear + held_out.n * c @ c)


def choose_rigid(sums: Sums, head: Head, *, kappa: float | Literal["auto"], bias: bool, scaled: bool = False) -> Rigid:
    """The map with a given kappa and the whole shift or, with `auto`, with what held-out inputs say of both.

    `bias`: with a shift, if the head has a bias that can take it up.
    """
    total, first = sums.total, first_map(head)
    bias = bias and first.bias is not None
    if kappa == "auto":
        chosen, share = _chosen(sums, head, KAPPAS, bias=bias, scaled=False)
        if scaled:  # of the turn that is best without a scale, or else of all: a scale may be worth it by itself
            kappas = KAPPAS if math.isinf(chosen) else (math.inf, chosen)
            chosen, share = _chosen(sums, head, kappas, bias=bias, scaled=True)
    else:
        chosen, share = kappa, 1.0 if bias else 0.0
    moments = seen_by(sums, bias=bias)
    polar = sums.once(("turn", chosen, bias), lambda: turn_of(moments, chosen, d=total.d, task=sums.task))
    read = sums.once(("read", first.weight, chosen, bias), lambda: polar.read_by(first.weight.double()))
    scale = 1.0
    if scaled and not polar.still:
        energy = float(moments.C.trace())
        scale = scale_of(polar.along(chosen * energy / total.d), energy, chosen)
    return Rigid(polar, read, scale, (total.mean_h, total.mean_t) if bias else None, chosen, share)


def _chosen(sums: Sums, head: Head, kappas: tuple[float, ...], *, bias: bool, scaled: bool) -> tuple[float, float]:
    """The kappa and share for the first linear map of a head, which aligners with one problem choose once."""
    choose = partial(_cross_validated, sums, centred_rows(head), kappas, bias=bias, scaled=scaled)
    return sums.once(("choice", first_map(head).weight, kappas, bias, scaled), choose)


def _cross_validated(
    sums: Sums, W: torch.Tensor, kappas: tuple[float, ...], *, bias: bool, scaled: bool
) -> tuple[float, float]:
    """Of all kappas and shares, from careful to bold, the first that is within one standard error of the best.

    Kappas are tried from the boldest on, until one is no longer near the best, and "change nothing" in any case: as
    good as trying all of them where errors fall and rise once.
    """
    seen, part = W, sums
    if sums.total.d > _LEADING:
        Q = sums.once("leading", lambda: _leading(sums.total))
        part, seen = sums.once("led", lambda: sums.seen_through(Q)), W @ Q
    if len(seen) > seen.shape[1]:  # only products of its columns with each other matter
        seen = torch.linalg.qr(seen, mode="r").R
    shares = _SHIFTS if bias else (0.0,)
    share = torch.tensor(shares, dtype=torch.float64)
    folds = [(train, spread(train) if bias else train, held_out) for train, held_out in part.splits()]
    if len(folds) < 2:  # one input: nothing to choose by
        return kappas[0], shares[0]

    def judged(kappa: float) -> torch.Tensor:
        """The mean error of every share, in every fold."""
        found = []
        for number, (train, moments, held_out) in enumerate(folds):
            # Aligners that differ in scale share the maps.
            turn = partial(_rough_turn, moments, kappa, d=sums.total.d, task=sums.task)
            A = sums.once(("fold", number, kappa, bias), turn)
            along, energy = float((A * moments.S).sum()), float(moments.C.trace())
            B = (scale_of(along, energy, kappa) if scaled else 1.0) * seen @ A
            c, gap = seen @ train.mean_t - B @ train.mean_h, B @ held_out.sum_h - seen @ held_out.sum_t
            # `loss_of`, whose shift is a share of c.
            fixed = ((B @ held_out.C - 2 * seen @ held_out.S) * B).sum()
            found.append((fixed + share * (2 * c @ gap) + share**2 * (held_out.n * c @ c)) / held_out.n)
        return torch.stack(found, 1)

    known = {kappas[0]: judged(kappas[0])}
    for kappa in reversed(kappas[1:]):
        known[kappa] = judged(kappa)
        bolder = torch.cat([known[each] for each in known if each <= kappa])
        if int(_near(bolder).nonzero()[-1]) < len(bolder) - len(shares):
            break
    tried = sorted(known, reverse=True)
    return list(product(tried, shares))[careful(torch.cat([known[kappa] for kappa in tried]))]


def _rough_turn(moments: Moments, kappa: float, *, d: int, task: str) -> torch.Tensor:
    """As `turn_of`, whole, but to six digits or so."""
    turn = turn_of(moments, kappa, d=d, task=task)
    if turn.still:
        return turn.A
    values, V = torch.linalg.eigh(turn.X.T @ turn.X)
    if float(values[0]) <= _SQUARED * float(values[-1]):
        return polar_factor(turn.X, task=task)
    near: torch.Tensor = (turn.X @ V / values.sqrt()) @ V.T
    return near


def careful(losses: torch.Tensor) -> int:
    """Of choices [k, n], from careful to bold, the first whose mean over n is within one standard error of the best."""
    return int(_near(losses).nonzero()[0])


def _near(losses: torch.Tensor) -> torch.Tensor:
    """Which of choices [k, n] are within one standard error of the best."""
    excess = losses - losses[int(losses.mean(1).argmin())]
    return excess.mean(1) <= excess.std(1, correction=1) / math.sqrt(losses.shape[1])


def _leading(total: Moments) -> torch.Tensor:
    """An orthonormal basis [d, r] of the directions along which both encoders' features lie most."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(total.d, _LEADING // 2, generator=generator, dtype=torch.float64).to(total.C.device).float()
    # Single precision is enough for where to look.
    C, S = (_single(each) for each in (total.C, total.S))
    one, other = C @ start, S @ start
    for _ in range(2):
        one, other = C @ torch.linalg.qr(one)[0], S @ (S.T @ torch.linalg.qr(other)[0])
    basis: torch.Tensor = torch.linalg.qr(torch.cat([one, other], 1).double())[0]
    return basis


def _single(X: torch.Tensor) -> torch.Tensor:
    """A multiple of X in single precision, where it could be too large or too small."""
    size = float(X.norm())
    return X.float() if 1e-12 < size < 1e12 or size == 0 else (X / size).float()
