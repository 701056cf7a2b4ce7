"""KL to the expert's outputs with a Gaussian prior at the expert's head, to the optimum: Aligned-C without a learning
rate.

    minimise over D    sum_i KL(softmax(z_i) || softmax(logits(x_i; W + D)))  +  lambda / 2 ||D||^2

by L-BFGS, where D changes the head's first linear map (and its bias). For a head of one layer the problem is convex,
and the result is the maximum a posteriori estimate. lambda = strength / (mean square of the head's own weights): the
prior says how far the weights move, compared with how large they are, and a strength means the same for every encoder.
It is chosen by cross-validation on at most `_JUDGED` inputs (a prior that is right for a part of them is right for
all): of all within one standard error of the best, the one nearest to the default. Fewer than `_ENOUGH` inputs, two a
fold, say nothing about a prior and leave the default alone.

In the basis of X = [H, a 1] = U diag(s) V^T (see `least_squares`) the change is D = E diag(w) V^T with w = (s^2 / 4 +
lambda)^-1/2, which makes the curvature about 1 in every direction: tens of iterations instead of hundreds.

Letters: H [n, d] what the head reads, z [n, C] the expert's logits, D [m, d + 1], E [m, r].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import linear, log_softmax

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.checks import strength
from orthomerge.alignment.folding import centred_rows, first_map, with_first_map
from orthomerge.alignment.problem import Problem
from orthomerge.errors import NumericalError
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["DEFAULT", "STRENGTHS", "KlMap", "KlProblem"]

STRENGTHS = (math.inf, 10.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 1e-4, 1e-5)
DEFAULT = 0.03
_JUDGED = 500
_ROUGH = 20  # iterations for fits that are only judged
_FOLDS = 5
_ENOUGH = 2 * _FOLDS


@dataclass(frozen=True)
class KlMap:
    """`strength` of the prior, auto for cross-validation; `steps`: most iterations of L-BFGS."""

    strength: float | Literal["auto"] = "auto"
    steps: int = 100

    def __post_init__(self) -> None:
        strength("strength", self.strength)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        kl = KlProblem(problem, steps=self.steps)
        chosen = kl.chosen() if self.strength == "auto" else self.strength
        if math.isinf(chosen):
            return Alignment(problem.head, {"strength": chosen})
        change = kl.solve(torch.arange(len(problem.H)), chosen) @ problem.spectrum.V.T
        first, d = first_map(problem.head), problem.head.width
        weight = first.weight.double() + change[:, :d]
        bias = None if first.bias is None else first.bias.double() + problem.spectrum.a * change[:, d]
        return Alignment(with_first_map(problem.head, weight, bias, task=problem.task), {"strength": chosen})


class KlProblem:
    """The optimisation in the basis of the inputs; rows can be left out, for cross-validation."""

    def __init__(self, problem: Problem, *, steps: int = 100) -> None:
        self._head, self._task, self._steps = problem.head, problem.task, steps
        self._spectrum = spectrum = problem.spectrum
        self._scaled = spectrum.U * spectrum.s  # X V
        first = first_map(problem.head)
        bias = None if first.bias is None else first.bias.double()
        self._start = linear(problem.H, first.weight.double(), bias)
        self._target = log_softmax(problem.Z, 1)
        spread = float(centred_rows(problem.head).square().mean())
        self._unit = 1 / spread if spread > 0 else spectrum.unit / len(problem.H)

    def solve(
        self, rows: torch.Tensor, strength: float, start: torch.Tensor | None = None, *, steps: int | None = None
    ) -> torch.Tensor:
        """G = E diag(w) [m, r] at the optimum over some rows, from `start`."""
        prior, w = self._prior(strength), self._metric(strength)
        if not len(w):  # features that are all zero: there is no direction in which a head could change
            return self._start.new_zeros(self._start.shape[1], 0)
        inputs, base, target = self._scaled[rows] * w, self._start[rows], self._target[rows]
        E = (inputs.new_zeros(base.shape[1], len(w)) if start is None else start / w).requires_grad_()
        optimiser = torch.optim.LBFGS(
            [E],
            max_iter=self._steps if steps is None else steps,
            tolerance_grad=1e-5,
            tolerance_change=1e-8 * len(rows),
            line_search_fn="strong_wolfe",
        )

        def closure() -> torch.Tensor:
            optimiser.zero_grad()
            loss = self._divergence(base + inputs @ E.T, target).sum() + prior / 2 * (E * w).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call]
        found = (E * w).detach()
        if not found.isfinite().all():
            raise NumericalError(f"kl-map diverged on {self._task!r}; raise its strength, or use 'ridge'")
        return found

    def chosen(self) -> float:
        """The strength that held-out inputs ask for; with few, the default."""
        judged = self.judged()
        if len(judged) < _ENOUGH:
            return DEFAULT
        rows: list[torch.Tensor] = []
        states: list[torch.Tensor | None] | None = None
        for tried in STRENGTHS:
            losses, states = self.held_out(tried, judged, states)
            rows.append(losses)
            means = [float(row.mean()) for row in rows[-3:]]
            if len(rows) > 3 and means[2] > means[1] > means[0]:
                break  # past the best: less prior only fits the noise better
        excess = torch.stack(rows)
        excess = excess - excess[int(excess.mean(1).argmin())]
        spread = excess.std(1, correction=1) / math.sqrt(len(judged))
        good = (excess.mean(1) <= spread).nonzero().flatten().tolist()
        return STRENGTHS[min(good, key=lambda place: abs(place - STRENGTHS.index(DEFAULT)))]

    def judged(self) -> torch.Tensor:
        """The inputs by which strengths are judged."""
        return torch.randperm(len(self._start), generator=torch.Generator().manual_seed(0))[:_JUDGED]

    def held_out(
        self, strength: float, judged: torch.Tensor, states: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The divergence [n] of every judged input under a fit without its fold, and where the fits ended."""
        folds = min(_FOLDS, len(judged))
        place = torch.arange(len(judged)) % folds
        losses = torch.empty(len(judged), dtype=torch.float64)
        found: list[torch.Tensor | None] = list(states or [None] * folds)
        for fold in range(folds):
            train, test = judged[place != fold], judged[place == fold]
            first = self._start[test]
            if not math.isinf(strength):
                found[fold] = G = self.solve(train, strength, found[fold], steps=_ROUGH)
                first = first + self._scaled[test] @ G.T
            losses[place == fold] = self._divergence(first, self._target[test])
        return losses, found

    def _prior(self, strength: float) -> float:
        return max(strength, 1e-9) * self._unit

    def _metric(self, strength: float) -> torch.Tensor:
        return (self._spectrum.s.square() / 4 + self._prior(strength)).rsqrt()

    def _divergence(self, first: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """KL [n] from the expert's outputs to those of the head whose first map gives `first` [n, m]."""
        head = self._head
        if head.hidden is not None and head.activation is not None:
            values = getattr(torch.nn.functional, head.activation)(first)
            bias = None if head.output.bias is None else head.output.bias.double()
            first = linear(values, head.output.weight.double(), bias)
        return (target.exp() * (target - log_softmax(first, 1))).sum(1)
