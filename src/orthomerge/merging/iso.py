"""Isotropic merging: give all directions of a merged matrix the same singular value.

Marczak et al., "No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces", 2025,
arXiv 2502.04959. Other tensors get scale * mean of the task vectors.

Letters: T experts; tau_t, X [m, k]; X = sum_t tau_t = U diag(s) V^T; W = U V^T its polar factor.
Differs from the paper: directions whose singular value is rounding are left out, of the mean too; the authors' code
fills the null space with arbitrary ones. It averages a CLIP `text_projection`; here that is a matrix like any other.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.core.checks import finite, fraction
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.polar import ROUNDING, joined, polar, svd


@dataclass(frozen=True)
class IsoC:
    """Iso-C: add the task vectors and give all directions the mean singular value: scale * mean(s) * U V^T.

    `scale`: alpha, for all tensors alike.
    """

    scale: float = 1.5

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        finite(scale=self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if base.ndim != 2:
            return deltas.mean(0) * self.scale
        return _isotropic(deltas.sum(0, dtype=torch.float64), scale=self.scale, key=site.key)


@dataclass(frozen=True)
class IsoCts:
    """Iso-CTS: Iso-C with some of the directions reserved for single experts.

    The sum gives its first c directions U_0, V_0, and each expert the first n directions of what U_0 leaves of it,
    tau_t - U_0 U_0^T tau_t. All are concatenated, made orthonormal by polar factors and given one singular value:
    delta = scale * mean(s) * polar([U_0 U_1 .. U_T]) polar([V_0 V_1 .. V_T])^T, with min(m, k) = c + T n and s the
    singular values of all. Where rounding would make c negative, n is rounded down.

    `scale`: alpha, for all tensors alike. `common`: share of the directions that come from the sum.
    """

    scale: float = 1.5
    common: float = 0.8

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        finite(scale=self.scale)
        fraction(common=self.common, zero=True)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if base.ndim != 2:
            return deltas.mean(0) * self.scale
        key, total = site.key, deltas.sum(0, dtype=torch.float64)
        c, n = self.split(min(base.shape), len(deltas))
        if n == 0:
            return _isotropic(total, scale=self.scale, key=key)
        parts = [svd(total, key=key, top=c)]
        U_0 = parts[0][0]
        for delta in deltas:
            tau = delta.double()
            # Where U_0 leaves nothing, what remains is the rounding of tau, not a direction.
            parts.append(svd(tau - U_0 @ (U_0.T @ tau), key=key, top=n, floor=ROUNDING * float(tau.norm())))
        U, s, Vh = joined(parts)
        return ((polar(U, key=key) * (self.scale * s.mean())) @ polar(Vh, key=key)).float()

    def split(self, r: int, T: int) -> tuple[int, int]:
        """Return how many of r directions come from the sum (c), and from each of T experts (n)."""
        n = min(round((r - int(r * self.common)) / T), r // T)
        return r - T * n, n


def _isotropic(X: torch.Tensor, *, scale: float, key: str) -> torch.Tensor:
    W = polar(X, key=key)
    rank = W.square().sum()
    if not rank:
        return torch.zeros_like(X, dtype=torch.float32)
    mean = (W * X).sum() / rank  # <W, X> = trace(V U^T U diag(s) V^T) = sum(s)
    return (W * (scale * mean)).float().contiguous()
