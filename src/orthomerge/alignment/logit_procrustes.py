"""Orthogonal map whose *logits* are nearest to the expert's; Procrustes compares features instead.

W A with A orthogonal can be any matrix with the Gram matrix of W: W' = K Q with K = (W W^T)^1/2 [m, m] and Q [m, d]
with orthonormal rows (on the range of K). Minimise over Q

    sum_i ||K Q x_i - W t_i||^2  -  2 kappa s <K^2 Q_0, Q>

by majorisation: with L = lambda_max(C), or a bound of it, here ||C^2||_F^1/2, every step

    Q <- polar(K^2 (L Q - Q C) + K W S + kappa s K^2 Q_0)

lowers it, because tr(K^2 Q Q^T) is the same for all Q. Steps are accelerated as in Nesterov 1983; one that raises the
objective is repeated without. Strength of the prior and start are those of the plain map (`rigid`).

Letters: x, t the head's inputs from merged and expert encoder; C = sum x x^T, S = sum t x^T [d, d], s = tr(C) / d; W
[m, d] the head's first linear map, Q_0 the polar factor of W.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.folding import first_map, with_first_map
from orthomerge.alignment.problem import Problem, Solved, check_strength
from orthomerge.alignment.rigid import choose_rigid, polar_factor, spread

_TOLERANCE = 1e-5  # share of the whole decrease below whose decrease the descent ends
_SMALL = 1e-12  # share of the objective that is rounding


@dataclass(frozen=True)
class LogitProcrustes(Solved):
    """`kappa`, `bias`: as of `orthogonal`; `steps`: most iterations."""

    kappa: float | Literal["auto"] = "auto"
    bias: bool = True
    steps: int = 200

    def __post_init__(self) -> None:
        check_strength("kappa", self.kappa)

    def align(self, problem: Problem) -> Alignment:
        start = choose_rigid(problem, kappa=self.kappa, bias=self.bias)
        first, weight, steps = first_map(problem.head), first_map(problem.head).weight.double(), 0
        if not math.isinf(start.kappa):
            H, T = (problem.H, problem.T) if start.shift is None else spread(problem.H, problem.T)
            C, S = H.T @ H, T.T @ H
            weight, steps = descend(weight, weight @ start.A, C, S, start.kappa, steps=self.steps, task=problem.task)
        bias = first.bias
        if bias is not None:  # the chosen share of the shift between the means
            shift = first.weight.double() @ problem.T.mean(0) - weight @ problem.H.mean(0)
            bias = bias.double() + start.share * shift
        head = with_first_map(problem.head, weight, bias, task=problem.task)
        return Alignment(head, {"kappa": start.kappa, "steps": steps})


def descend(
    W: torch.Tensor,
    start: torch.Tensor,
    C: torch.Tensor,
    S: torch.Tensor,
    kappa: float,
    *,
    steps: int,
    tolerance: float = _TOLERANCE,
    task: str = "",
) -> tuple[torch.Tensor, int]:
    """Return W' [m, d] with W' W'^T = W W^T, from `start`, and the number of iterations; `task` is for messages."""
    if float(C.trace()) <= 0:  # every W' has the same objective
        return start, 0
    values, vectors = torch.linalg.eigh(W @ W.T)
    kept = values > 1e-10 * values[-1]
    k, rows = values[kept][:, None], vectors[:, kept]  # K = rows diag(sqrt k) rows^T
    root, s = k.sqrt(), float(C.trace()) / len(C)
    # In the basis of K, Q [r, d] has orthonormal rows, and K is diagonal.
    pull, Q = root * (rows.T @ (W @ S)) + kappa * s * root * (rows.T @ W), rows.T @ start / root
    kL = k * float(torch.linalg.matrix_norm(C @ C)) ** 0.5

    def objective(Q: torch.Tensor) -> float:
        return float(((k * (Q @ C) - 2 * pull) * Q).sum())

    def step(Q: torch.Tensor) -> torch.Tensor:
        return polar_factor(kL * Q - k * (Q @ C) + pull, task=task)

    value = first = objective(Q)
    ahead, pace, done = Q, 1.0, 0
    while done < steps:
        done += 1
        new = step(ahead)
        reached = objective(new)
        if reached > value and ahead is not Q:
            new, pace = step(Q), 1.0
            reached = objective(new)
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        ahead, pace = torch.lerp(Q, new, 1 + (pace - 1) / faster), faster
        fall, Q, value = value - reached, new, reached
        if fall <= tolerance * max(first - value, _SMALL * abs(value)):
            break
    return rows @ (root * Q), done
