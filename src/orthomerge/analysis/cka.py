"""Linear CKA: the similarity of two sets of features, invariant to rotation, shift and common scale.

Kornblith et al. 2019, arXiv 1905.00414; without bias: Song et al. 2012 (HSIC_1), Nguyen et al. 2021, arXiv 2010.15327.

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)),    HSIC(X, Y) = |X^T Y|_F^2  with columns centred.

With fewer inputs than features that is near 1 for anything. The unbiased HSIC is, with K = X X^T and L = Y Y^T whose
diagonals are set to zero,

    tr(K L) + (1'K1)(1'L1) / ((n-1)(n-2)) - 2 1'K L 1 / (n-2),

up to a factor that cancels. 1: equal up to rotation, shift and scale; 0: no more alike than by chance (the estimate may
be a little below 0). NaN where features are constant.

CKA of updates: the mean over pairs of experts of the CKA of X M_t^T (Stoica et al. 2025, arXiv 2410.19735). Theorem: in
the joint basis of KnOTS an expert's part S V_t^T = U^T M_t has the very same CKA, for U keeps all angles and lengths
between the outputs. Only without S, as X V_t, does the number move: every direction then counts alike. Differs from the
paper: the authors' code has no CKA, so which inputs, and whether with S, is our choice.

Letters: X [n, p], Y [n, q], one row per input; T experts; M_t [m, k] the update of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import torch

from orthomerge.analysis._checks import paired
from orthomerge.core.errors import RecipeError
from orthomerge.merging.joint import joint_basis, parts

LEAST = 4  # inputs that the unbiased estimate needs
_FLAT = 1e-12  # share of the sum of squares below which variation is rounding

View = Literal["updates", "parts", "directions"]


def linear_cka(X: torch.Tensor, Y: torch.Tensor, *, unbiased: bool = False) -> float:
    """CKA of two sets of features of the same inputs."""
    X, Y = paired(X, Y, what="features for CKA", least=LEAST if unbiased else 2, same_width=False)
    one, other = _centred(X), _centred(Y)
    if one is None or other is None:
        return math.nan
    hsic = _unbiased_hsic if unbiased else _hsic
    sizes = hsic(one, one) * hsic(other, other)
    return hsic(one, other) / math.sqrt(sizes) if sizes > 0 else math.nan


def cka_matrix(views: Sequence[torch.Tensor]) -> tuple[tuple[float, ...], ...]:
    """Unbiased CKA of every pair of views of the same inputs; symmetric, 1 with itself (NaN where constant)."""
    matrix = [[math.nan] * len(views) for _ in views]
    for i, one in enumerate(views):
        for j in range(i, len(views)):
            matrix[i][j] = matrix[j][i] = linear_cka(one, views[j], unbiased=True)
    return tuple(map(tuple, matrix))


def update_cka(updates: torch.Tensor, *, inputs: torch.Tensor | None = None, view: View = "updates") -> float:
    """Mean unbiased CKA over all pairs of experts; NaN if no two of them change anything.

    `updates` [T, m, k]. `inputs` X [n, k]: the k coordinates themselves if None. `view`: the updates, their parts
    S V_t^T in the joint basis, or V_t^T alone.
    """
    if updates.ndim != 3 or len(updates) < 2:
        raise RecipeError(f"updates must be [experts, out, in] of at least two experts, got {tuple(updates.shape)}")
    viewed = updates.double()
    if view != "updates":
        viewed = parts(joint_basis(updates, key="updates"), updates).double()
    if view == "directions":
        viewed = viewed / viewed.square().sum((0, 2)).sqrt()[:, None]  # the norm of a row over all experts is S
    X = torch.eye(updates.shape[2], dtype=torch.float64) if inputs is None else inputs.double()
    pairs = combinations([X @ M.T for M in viewed], 2)
    values = [value for one, other in pairs if math.isfinite(value := linear_cka(one, other, unbiased=True))]
    return sum(values) / len(values) if values else math.nan


def _centred(X: torch.Tensor) -> torch.Tensor | None:
    """X with its means subtracted and of norm 1; None if nothing varies."""
    centred = X - X.mean(0)
    size, left = float(X.square().sum()), float(centred.square().sum())
    return None if left <= _FLAT * size else centred / math.sqrt(left)


def _hsic(X: torch.Tensor, Y: torch.Tensor) -> float:
    n, p, q = len(X), X.shape[1], Y.shape[1]
    if n * n < p * q:
        return float(((X @ X.T) * (Y @ Y.T)).sum())
    return float((X.T @ Y).square().sum())


def _unbiased_hsic(X: torch.Tensor, Y: torch.Tensor) -> float:
    n = len(X)
    K, L = X @ X.T, Y @ Y.T
    K.fill_diagonal_(0)
    L.fill_diagonal_(0)
    k, m = K.sum(1), L.sum(1)
    sums = k.sum() * m.sum() / ((n - 1) * (n - 2))
    return float((K * L).sum() + sums - 2 * (k @ m) / (n - 2))
