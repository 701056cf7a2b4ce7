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
        choose = partial(_cross_validated, sums, centred_rows(head), bias=bias, scaled=scaled)
        chosen, share = sums.once(("choice", first.weight, bias, scaled), choose)
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


def _cross_validated(sums: Sums, W: torch.Tensor, *, bias: bool, scaled: bool) -> tuple[float, float]:
    """Of all kappas and shares, from careful to bold, the first that is within one standard error of the best."""
    seen, part = W, sums
    if sums.total.d > _LEADING:
        Q = sums.once("leading", lambda: _leading(sums.total))
        part, seen = sums.once("led", lambda: sums.seen_through(Q)), W @ Q
    if len(seen) > seen.shape[1]:  # only products of its columns with each other matter
        seen = torch.linalg.qr(seen, mode="r").R
    shares = _SHIFTS if bias else (0.0,)
    share, losses = torch.tensor(shares, dtype=torch.float64), list[torch.Tensor]()
    for number, (train, held_out) in enumerate(part.splits()):
        moments = spread(train) if bias else train
        # Aligners that differ in scale share the maps.
        A = sums.once(("folds", number, bias), partial(_turns, moments, d=sums.total.d, task=sums.task))
        B = seen @ A  # [k, m, r], with a map for each kappa
        if scaled:
            along, energy = (A * moments.S).sum((1, 2)).tolist(), float(moments.C.trace())
            scales = [scale_of(each, energy, kappa) for each, kappa in zip(along, KAPPAS, strict=True)]
            B = B * B.new_tensor(scales)[:, None, None]
        c, gap = seen @ train.mean_t - B @ train.mean_h, B @ held_out.sum_h - seen @ held_out.sum_t
        # `loss_of`, whose shift is a share of c.
        fixed = ((B @ held_out.C - 2 * seen @ held_out.S) * B).sum((1, 2))
        once, twice = 2 * (c * gap).sum(1), held_out.n * c.square().sum(1)
        losses.append((fixed[:, None] + share * once[:, None] + share**2 * twice[:, None]).flatten() / held_out.n)
    choices = list(product(KAPPAS, shares))
    # One input leaves nothing to choose by.
    return choices[careful(torch.stack(losses, 1))] if len(losses) > 1 else choices[0]


def _turns(moments: Moments, *, d: int, task: str) -> torch.Tensor:
    """A [k, r, r] for every one of `KAPPAS`, to six digits or so; otherwise as `turn_of`."""
    energy, eye = float(moments.C.trace()), torch.eye(moments.d, dtype=moments.S.dtype, device=moments.S.device)
    found = eye.repeat(len(KAPPAS), 1, 1)
    if energy <= 0:
        return found
    X = moments.S + eye * (found.new_tensor(KAPPAS[1:]) * energy / d)[:, None, None]
    values, V = torch.linalg.eigh(X.mT @ X)
    found[1:] = (X @ V / values.sqrt()[:, None]) @ V.mT
    for place in (values[:, 0] <= _SQUARED * values[:, -1]).nonzero().flatten().tolist():
        found[1 + place] = polar_factor(X[place], task=task)
    return found


def careful(losses: torch.Tensor) -> int:
    """Of choices [k, n], from careful to bold, the first whose mean over n is within one standard error of the best."""
    excess = losses - losses[int(losses.mean(1).argmin())]
    spread = excess.std(1, correction=1) / math.sqrt(losses.shape[1])
    return int((excess.mean(1) <= spread).nonzero()[0])


def _leading(total: Moments) -> torch.Tensor:
    """An orthonormal basis [d, r] of the directions along which both encoders' features lie most."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(total.d, _LEADING // 2, generator=generator, dtype=torch.float64).to(total.C.device).float()
    # Single precision is enough for where to look; their size could be too much for it.
    C, S = ((each / (float(each.norm()) or 1.0)).float() for each in (total.C, total.S))
    one, other = C @ start, S @ start
    for _ in range(2):
        one, other = C @ torch.linalg.qr(one)[0], S @ (S.T @ torch.linalg.qr(other)[0])
    basis: torch.Tensor = torch.linalg.qr(torch.cat([one, other], 1).double())[0]
    return basis
