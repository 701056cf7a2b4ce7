"""The head with the least KL to the expert's outputs, with a Gaussian prior at the expert's head.

    minimise over D    sum_i KL(softmax(z_i) || softmax(logits(x_i; W + D)))  +  lambda / 2 ||D||^2

by Newton's method (`newton`), where D changes the head's first linear map (and its bias). For a head of one layer the
problem is convex, and the result is the maximum a posteriori estimate. lambda = strength / (mean square of the head's
own weights), so that a strength means the same for every encoder. It is chosen by cross-validation on at most
`_JUDGED` inputs, every fit starting where that under a stronger prior ended: of all within one standard error of the
best, the one nearest to the default, which is also taken with fewer than `_ENOUGH` inputs, two per fold.

The method starts from the best of: no change; two least squares fits of the logits, in closed form in the basis of
X = [H, a 1] = U diag(s) V^T (`problem`), in which D = G V^T; for a head of one layer, the minimum of the
objective's second-order expansion at the expert's own outputs. It ends when a step promises to lower the objective by
less than a share `_SETTLED` of it.

Letters: H [n, d] what the head reads, z [n, C] the expert's logits, D [m, d + 1], G [m, r].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch.nn.functional import log_softmax

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.folding import centred_rows, first_map
from orthomerge.alignment.newton import Fit, Rows
from orthomerge.alignment.problem import Problem, Solved, check_strength, near_best
from orthomerge.core.device import device_of
from orthomerge.core.errors import NumericalError

STRENGTHS = (math.inf, 10.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 1e-4, 1e-5)
DEFAULT = 0.03
_JUDGED = 500
_SETTLED = 1e-7  # share of the objective that a step must promise to be worth another
_ROUGH = 1e-1  # the same for fits that are only judged
_STEPS = 200
_FOLDS = 5
_ENOUGH = 2 * _FOLDS


@dataclass(frozen=True)
class KlMap(Solved):
    """`strength` of the prior, auto for cross-validation; `steps`: most steps of Newton's method.

    `device`: what it is solved on; with many classes a GPU is faster.
    """

    strength: float | Literal["auto"] = "auto"
    steps: int = _STEPS
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_strength("strength", self.strength)

    def align(self, problem: Problem) -> Alignment:
        """Facts: the strength, whether the tolerance was reached, and in how many steps."""
        kl = KlProblem(problem, steps=self.steps, device=self.device)
        chosen = kl.chosen() if self.strength == "auto" else self.strength
        if math.isinf(chosen):
            return Alignment(problem.head, {"strength": chosen, "converged": True, "steps": 0})
        fit = kl.solve(torch.arange(len(problem.H)), chosen)
        head = problem.changed(fit.G.cpu() @ problem.spectrum.V.T)
        return Alignment(head, {"strength": chosen, "converged": fit.converged, "steps": fit.steps})


class KlProblem:
    """The optimisation in the basis of the inputs; rows can be left out, for cross-validation."""

    def __init__(self, problem: Problem, *, steps: int = _STEPS, device: str = "cpu") -> None:
        self._problem, self._steps, self._device = problem, steps, device_of(device)
        head, spectrum = problem.head, problem.spectrum
        XV, first, target = spectrum.U * spectrum.s, first_map(head)(problem.H), log_softmax(problem.Z, 1)
        self._all = Rows(XV.to(self._device), first.to(self._device), target.to(self._device), head.to(self._device))
        spread = float(centred_rows(problem.head).square().mean())
        self._order = torch.randperm(len(problem.H), generator=torch.Generator().manual_seed(0))
        self.judged = self._order[:_JUDGED]  # the inputs by which strengths are judged
        self._unit = 1 / spread if spread > 0 else spectrum.unit / len(problem.H)

    def solve(
        self, rows: torch.Tensor, strength: float, start: torch.Tensor | None = None, *, tolerance: float = _SETTLED
    ) -> Fit:
        """G [m, r] at the optimum over some rows, from `start` or from the best of the module's."""
        mine, prior = self._all.take(rows), self._prior(strength)
        if start is None:
            start = mine.nearest([self._none(mine), *self._near(prior)], prior)
            if mine.head.hidden is None:
                start = mine.nearest([start, mine.expanded(prior, start)], prior)
        return self._minimised(mine, prior, start, tolerance)

    def chosen(self) -> float:
        """The strength chosen by cross-validation; with few inputs the default."""
        if len(self.judged) < _ENOUGH:
            return DEFAULT
        rows: list[torch.Tensor] = []
        states: list[torch.Tensor] | None = None
        for tried in STRENGTHS:
            losses, states = self.held_out(tried, states)
            rows.append(losses)
            means = [float(row.mean()) for row in rows[-3:]]
            if len(rows) > 3 and means[2] > means[1] > means[0]:
                break  # past the best: a weaker prior only fits more of the noise
        default = STRENGTHS.index(DEFAULT)
        return STRENGTHS[min(near_best(torch.stack(rows)), key=lambda place: abs(place - default))]

    def rivals(self, strength: float) -> torch.Tensor:
        """The divergence [4, n] of `_JUDGED` inputs or, in folds, of all, under fits to the others.

        The four: the head unchanged, the fit under this strength, ridge, and the mean of the last two.
        """
        losses: list[torch.Tensor] = []
        for fold in range(min(_FOLDS, len(self._order))):
            mine = torch.arange(len(self._order)) % _FOLDS == fold
            train, test = self._order[~mine], self._all.take(self._order[mine])
            none = self._none(test)
            ours = none if math.isinf(strength) else self.solve(train, strength, tolerance=_ROUGH).G
            ridge = self._ridge(train)
            losses.append(torch.stack([test.divergence(G) for G in (none, ours, ridge, (ours + ridge) / 2)]))
            if sum(each.shape[1] for each in losses) >= _JUDGED:
                break
        return torch.cat(losses, 1).cpu()

    def held_out(
        self, strength: float, states: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The divergence [n] of every judged input under a fit without its fold, and where the fits ended."""
        losses = torch.empty(len(self.judged), dtype=torch.float64)
        ends = list(states or [self._none(train) for train, _ in self._folds])
        for number, (train, test) in enumerate(self._folds):
            if not math.isinf(strength):
                ends[number] = self._minimised(train, self._prior(strength), ends[number], _ROUGH).G
            losses[number :: len(self._folds)] = test.divergence(ends[number]).cpu()
        return losses, ends

    @cached_property
    def _folds(self) -> list[tuple[Rows, Rows]]:
        """Inputs to fit to and inputs to judge by, of every fold."""
        count = min(_FOLDS, len(self.judged))
        number, folds = torch.arange(len(self.judged)) % count, []
        for each in range(count):
            train, test = (self._all.take(self.judged[place]) for place in (number != each, number == each))
            if len(train.X) < train.X.shape[1]:  # fewer inputs than directions: use theirs alone
                basis = torch.linalg.qr(train.X.T)[0]
                train, test = train.through(basis), test.through(basis)
            folds.append((train, test))
        return folds

    def _ridge(self, rows: torch.Tensor) -> torch.Tensor:
        """G of ridge, fitted to some rows with the strength chosen on all."""
        problem, X = self._problem, self._all.X[rows]
        if math.isinf(problem.strength):
            return self._none(self._all)
        A = X.T @ X
        A.diagonal().add_(problem.strength * problem.spectrum.unit * len(rows) / len(self._order))
        residual = problem.residual[rows].to(self._device)
        return torch.cholesky_solve(X.T @ residual, torch.linalg.cholesky(A)).T

    def _minimised(self, rows: Rows, prior: float, start: torch.Tensor, tolerance: float) -> Fit:
        fit = rows.minimised(prior, start, tolerance=tolerance, steps=self._steps)
        if not math.isfinite(fit.value):
            raise NumericalError(f"kl-map diverged on {self._problem.task!r}; raise its strength, or use 'ridge'")
        return fit

    def _none(self, rows: Rows) -> torch.Tensor:
        return rows.X.new_zeros(rows.base.shape[1], rows.X.shape[1])

    def _near(self, prior: float) -> list[torch.Tensor]:
        """Least squares starts: one curvature for all inputs and classes in the place of the divergence's."""
        spectrum, R = self._problem.spectrum, self._problem.residual
        seen = (spectrum.U.T @ R).T * spectrum.s
        q = self._all.target.exp()
        curvature = float((q - q.square()).mean())
        starts = [seen / (spectrum.s.square() + prior / each) for each in (1.0, curvature) if each > 0]
        return [G.to(self._device) for G in starts]

    def _prior(self, strength: float) -> float:
        return max(strength, 1e-9) * self._unit
