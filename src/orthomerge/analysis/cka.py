"""Linear CKA: how alike two sets of features are, whatever the rotation, shift or common scale between them.

Kornblith et al. 2019, arXiv 1905.00414; without bias: Song et al. 2012 (HSIC_1), Nguyen et al. 2021, arXiv 2010.15327.

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)),    HSIC(X, Y) = |X^T Y|_F^2  with columns centred.

With fewer inputs than features that is near 1 for anything. The unbiased HSIC is, with K = X X^T and L = Y Y^T whose
diagonals are set to zero,

    tr(K L) + (1'K1)(1'L1) / ((n-1)(n-2)) - 2 1'K L 1 / (n-2),

up to a factor that cancels. 1: equal up to rotation, shift and scale; 0: no more alike than by chance (then it may come
out a little below 0). NaN where features are constant: there is nothing to be alike.

Letters: X [n, p], Y [n, q], a row for every input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from orthomerge.analysis.checking import matched, whole
from orthomerge.analysis.figures import Heat
from orthomerge.core.errors import RecipeError

LEAST = 4  # inputs that the unbiased estimate needs
_FLAT = 1e-12  # share of the sum of squares below which what varies is rounding


def linear_cka(X: torch.Tensor, Y: torch.Tensor, *, unbiased: bool = False) -> float:
    """CKA of the same inputs seen in two ways."""
    X, Y = matched(X, Y, what="features for CKA", least=LEAST if unbiased else 2, same_width=False)
    one, other = _centred(X), _centred(Y)
    if one is None or other is None:
        return math.nan
    hsic = _unbiased if unbiased else _biased
    sizes = hsic(one, one) * hsic(other, other)
    return hsic(one, other) / math.sqrt(sizes) if sizes > 0 else math.nan


def cka_matrix(views: Sequence[torch.Tensor], *, unbiased: bool = True) -> tuple[tuple[float, ...], ...]:
    """CKA of every pair of views of the same inputs; symmetric, 1 with itself (NaN where constant)."""
    if not views:
        raise RecipeError("CKA of no views does not exist; give at least one")
    for view in views:
        whole(view, what="features for CKA", least=LEAST if unbiased else 2)
    found = [[math.nan] * len(views) for _ in views]
    for i, one in enumerate(views):
        for j in range(i, len(views)):
            found[i][j] = found[j][i] = linear_cka(one, views[j], unbiased=unbiased)
    return tuple(map(tuple, found))


def layer_figure(by_task: Mapping[str, Mapping[str, float]], *, inputs: int, pooling: str) -> Heat:
    """Merged against expert, a row for every layer and a column for every task."""
    layers = tuple(next(iter(by_task.values())))
    values = tuple(tuple(by_task[task].get(layer, math.nan) for task in by_task) for layer in layers)
    return Heat(
        "cka-layers",
        "Merged and expert, layer by layer",
        f"Linear CKA (unbiased) of hidden states on at most {inputs} test inputs of the task, read as the pooling "
        f"{pooling!r} reads the last ones. 1: equal up to a rotation and a scale. Missing: the layer says the same of "
        "every input there.",
        layers,
        tuple(by_task),
        values,
        "CKA",
    )


def pair_figure(names: Sequence[str], values: tuple[tuple[float, ...], ...], *, inputs: int) -> Heat:
    """Every expert, and the merged encoder, against every other."""
    return Heat(
        "cka-experts",
        "How alike the encoders see things",
        f"Linear CKA (unbiased) between features of the same {inputs} test inputs, as many of every task. Inputs of "
        "several tasks fall apart into tasks, which all encoders see: this alone makes for a high CKA.",
        tuple(names),
        tuple(names),
        values,
        "CKA",
    )


def _centred(X: torch.Tensor) -> torch.Tensor | None:
    """X with its means taken off and of norm 1; None where nothing varies."""
    centred = X - X.mean(0)
    size, left = float(X.square().sum()), float(centred.square().sum())
    return None if left <= _FLAT * size else centred / math.sqrt(left)


def _biased(X: torch.Tensor, Y: torch.Tensor) -> float:
    n, p, q = len(X), X.shape[1], Y.shape[1]
    if n * n < p * q:
        return float(((X @ X.T) * (Y @ Y.T)).sum())
    return float((X.T @ Y).square().sum())


def _unbiased(X: torch.Tensor, Y: torch.Tensor) -> float:
    n = len(X)
    K, L = X @ X.T, Y @ Y.T
    K.fill_diagonal_(0)
    L.fill_diagonal_(0)
    k, m = K.sum(1), L.sum(1)
    whole_sum = k.sum() * m.sum() / ((n - 1) * (n - 2))
    return float((K * L).sum() + whole_sum - 2 * (k @ m) / (n - 2))
