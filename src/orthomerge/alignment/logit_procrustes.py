"""Procrustes where the head looks: the orthogonal map whose *logits* are nearest to the expert's.

Plain Procrustes spends most of its freedom on directions that the head never reads. Of W A with A orthogonal, all that
can be reached are the matrices with the Gram matrix of W: W' = K Q with K = (W W^T)^1/2 [m, m] and Q [m, d] with
orthonormal rows (on the range of K). Minimise over Q

    sum_i ||K Q x_i - W t_i||^2  -  2 kappa s <K^2 Q_0, Q>

by majorisation: with L = lambda_max(K^2) lambda_max(C) every step Q <- polar(L Q - K^2 Q C + K W S + kappa s K^2 Q_0)
lowers it. The prior keeps directions without inputs where they are; its strength is taken from the cross-validated
plain map (`rigid`), whose head is also where the iteration starts.

Letters: x, t what the head reads of merged and expert encoder; C = sum x x^T, S = sum t x^T [d, d], s = tr(C) / d; W
[m, d] the head's first linear map, Q_0 the polar factor of W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import first_map, with_first_map
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import choose_rigid, spread
from orthomerge.alignment.sums import Sums
from orthomerge.features.features import FeaturePair
from orthomerge.features.statistics import Moments
from orthomerge.heads import Head

__all__ = ["LogitProcrustes"]

_SETTLED = 1e-7  # relative change of W' that ends the iteration


@dataclass(frozen=True)
class LogitProcrustes:
    """`kappa`, `bias`: as of `orthogonal`; `steps`: most iterations."""

    kappa: float | Literal["auto"] = "auto"
    bias: bool = True
    steps: int = 200

    def __post_init__(self) -> None:
        strength("kappa", self.kappa)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        return self.solve(problem.sums, problem.head)

    def solve(self, sums: Sums, head: Head) -> Alignment:
        start = choose_rigid(sums, head, kappa=self.kappa, bias=self.bias)
        if math.isinf(start.kappa):
            return Alignment(
                with_shift(head, first_map(head).weight.double(), start.share, sums), _facts(start.kappa, 0)
            )
        first, total = first_map(head), sums.total
        W = first.weight.double()
        moments = spread(total) if start.shift is not None else total
        made, steps = descend(W, W @ start.A, moments, start.kappa, d=total.d, steps=self.steps)
        return Alignment(with_shift(head, made, start.share, sums), _facts(start.kappa, steps))


def with_shift(head: Head, weight: torch.Tensor, share: float, sums: Sums) -> Head:
    """The head with another weight, and a bias that moves the means onto each other as far as `share` says."""
    first, total = first_map(head), sums.total
    if first.bias is None:
        return with_first_map(head, weight, None, task=sums.task)
    shift = first.weight.double() @ total.mean_t - weight @ total.mean_h
    return with_first_map(head, weight, first.bias.double() + share * shift, task=sums.task)


def descend(
    W: torch.Tensor, start: torch.Tensor, moments: Moments, kappa: float, *, d: int, steps: int
) -> tuple[torch.Tensor, int]:
    """W' [m, d] with W' W'^T = W W^T, from `start`, and the number of iterations."""
    if float(moments.C.trace()) <= 0:  # every W' is as good: stay
        return start, 0
    values, vectors = torch.linalg.eigh(W @ W.T)
    kept = values > 1e-10 * values[-1]
    root, basis = values[kept].sqrt(), vectors[:, kept]  # K = basis diag(root) basis^T
    C, s = moments.C, float(moments.C.trace()) / d
    bound = float(values[-1]) * float(torch.linalg.eigvalsh(C)[-1])
    # In the basis of K, Q [r, d] has orthonormal rows, and K is diagonal.
    Q = basis.T @ start / root[:, None]
    first = basis.T @ W / root[:, None]
    pull = root[:, None] * (basis.T @ (W @ moments.S)) + kappa * s * root.square()[:, None] * first
    done = 0
    while done < steps:
        done += 1
        U, _, Vt = torch.linalg.svd(bound * Q - root.square()[:, None] * (Q @ C) + pull, full_matrices=False)
        new = U @ Vt
        moved = float((root[:, None] * (new - Q)).norm() / root.norm())
        Q = new
        if moved < _SETTLED:
            break
    return basis @ (root[:, None] * Q), done


def _facts(kappa: float, steps: int) -> dict[str, float | int | str | bool]:
    return {"kappa": kappa, "steps": steps}
