"""Linear CKA: the similarity of two sets of features, invariant to rotation, shift and common scale.

Kornblith et al. 2019, arXiv 1905.00414; without bias: Song et al. 2012 (HSIC_1), Nguyen et al. 2021, arXiv 2010.15327.

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y))

With HSIC = |X^T Y|_F^2, columns centred, and fewer inputs than features that is near 1 for anything. The unbiased HSIC
is, with K = X X^T and L = Y Y^T whose diagonals are set to zero,

    tr(K L) + (1'K1)(1'L1) / ((n-1)(n-2)) - 2 1'K L 1 / (n-2),

up to a factor that cancels. 1: equal up to rotation, shift and scale; 0: no more alike than by chance (the estimate may
be a little below 0). NaN where features are constant.

Letters: X [n, p], Y [n, q], one row per input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from orthomerge.core.errors import IncompatibleError

LEAST = 4  # inputs that the unbiased estimate needs
_FLAT = 1e-12  # share of the sum of squares below which variation is rounding


def linear_cka(X: torch.Tensor, Y: torch.Tensor) -> float:
    """Unbiased CKA of two sets of features of the same inputs."""
    if len(X) != len(Y) or len(X) < LEAST:
        raise IncompatibleError(
            f"CKA compares features of the same inputs, at least {LEAST}, got {list(X.shape)} and {list(Y.shape)}"
        )
    one, other = _centred(X.double()), _centred(Y.double())
    if one is None or other is None:
        return math.nan
    sizes = _hsic(one, one) * _hsic(other, other)
    return _hsic(one, other) / math.sqrt(sizes) if sizes > 0 else math.nan


def cka_matrix(views: Sequence[torch.Tensor]) -> tuple[tuple[float, ...], ...]:
    """Unbiased CKA of every pair of views of the same inputs; symmetric, 1 with itself (NaN where constant)."""
    matrix = [[math.nan] * len(views) for _ in views]
    for i, one in enumerate(views):
        for j in range(i, len(views)):
            matrix[i][j] = matrix[j][i] = linear_cka(one, views[j])
    return tuple(map(tuple, matrix))


def _centred(X: torch.Tensor) -> torch.Tensor | None:
    """X with its means subtracted and of norm 1; None if nothing varies."""
    centred = X - X.mean(0)
    size, left = float(X.square().sum()), float(centred.square().sum())
    return None if left <= _FLAT * size else centred / math.sqrt(left)


def _hsic(X: torch.Tensor, Y: torch.Tensor) -> float:
    n = len(X)
    K, L = X @ X.T, Y @ Y.T
    K.fill_diagonal_(0)
    L.fill_diagonal_(0)
    k, m = K.sum(1), L.sum(1)
    sums = k.sum() * m.sum() / ((n - 1) * (n - 2))
    return float((K * L).sum() + sums - 2 * (k @ m) / (n - 2))
