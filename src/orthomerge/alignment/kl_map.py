"""Fit the head with the least KL to the expert's outputs, with a Gaussian prior at the expert's head.

    minimise over D    sum_i KL(softmax(z_i) || softmax(logits(x_i; W + D)))  +  lambda / 2 ||D||^2

by Newton's method (`newton`), where D changes the head's first linear map (and its bias). For a head of one layer the
problem is convex. lambda = strength / (mean square of the head's own weights), so that a strength has the same effect
for every encoder. It is chosen by cross-validation on at most `_HELD_OUT` inputs: of all within one standard error of
the best, the one nearest to the default. With fewer than `_ENOUGH` inputs it is the default.

The method starts from the best of: no change; two least squares fits of the logits, in closed form in the basis of
X = [H, a 1] = U diag(s) V^T (`problem`), D = G V^T; for one layer, the second-order minimum at the expert's outputs.

Letters: H [n, d] the inputs of the head's first map, z [n, C] the expert's logits, D [m, d + 1], G [m, r].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_HELD_OUT = 500  # most inputs that are held out
_TOLERANCE = 1e-7  # share of the objective below whose predicted decrease the method ends
_ROUGH = 1e-1  # the same for fits that are only compared
_STEPS = 200
_FOLDS = 5
_ENOUGH = 2 * _FOLDS


@dataclass(frozen=True)
class KlMap(Solved):
    """`strength` of the prior, auto: cross-validated; `steps`: most Newton steps; `device`: a GPU for many classes."""

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
    """Optimisation in the basis of the inputs, on any of their rows."""

    def __init__(self, problem: Problem, *, steps: int = _STEPS, device: str = "cpu") -> None:
        self._problem, self._steps, self._device = problem, steps, device_of(device)
        head, spectrum = problem.head, problem.spectrum
        XV, first, target = spectrum.U * spectrum.s, first_map(head)(problem.H), log_softmax(problem.Z, 1)
        self._all = Rows(XV.to(self._device), first.to(self._device), target.to(self._device), head.to(self._device))
        spread = float(centred_rows(problem.head).square().mean())
        self._order = torch.randperm(len(problem.H), generator=torch.Generator().manual_seed(0))
        self.held = self._order[:_HELD_OUT]  # the inputs that are held out in folds
        self._unit = 1 / spread if spread > 0 else spectrum.unit / len(problem.H)

    def solve(
        self, rows: torch.Tensor, strength: float, start: torch.Tensor | None = None, *, tolerance: float = _TOLERANCE
    ) -> Fit:
        """Solve for G [m, r] on some rows, from `start` or from the best start of the module's list."""
        some, prior = self._all.take(rows), self._prior(strength)
        if start is None:
            start = some.best([self._zeros(some), *self._starts(prior)], prior)
            if some.head.hidden is None:
                start = some.best([start, some.expanded(prior, start)], prior)
        return self._minimised(some, prior, start, tolerance)

    def chosen(self) -> float:
        """Choose the strength by cross-validation; with few inputs the default."""
        if len(self.held) < _ENOUGH:
            return DEFAULT
        rows: list[torch.Tensor] = []
        states: list[torch.Tensor] | None = None
        for strength in STRENGTHS:
            losses, states = self.held_out(strength, states)
            rows.append(losses)
            means = [float(row.mean()) for row in rows[-3:]]
            if len(rows) > 3 and means[2] > means[1] > means[0]:
                break  # a weaker prior only overfits more
        return STRENGTHS[min(near_best(torch.stack(rows)), key=lambda place: abs(place - STRENGTHS.index(DEFAULT)))]

    def candidate_losses(self, strength: float) -> torch.Tensor:
        """Held-out divergence [4, n] of no change, the fit under this strength, ridge, and the mean of both fits."""
        losses: list[torch.Tensor] = []
        for fold in range(min(_FOLDS, len(self._order))):
            inside = torch.arange(len(self._order)) % _FOLDS == fold
            train, test = self._order[~inside], self._all.take(self._order[inside])
            zeros = self._zeros(test)
            kl = zeros if math.isinf(strength) else self.solve(train, strength, tolerance=_ROUGH).G
            ridge = self._ridge(train)
            losses.append(torch.stack([test.divergence(G) for G in (zeros, kl, ridge, (kl + ridge) / 2)]))
            if sum(part.shape[1] for part in losses) >= _HELD_OUT:
                break
        return torch.cat(losses, 1).cpu()

    def held_out(
        self, strength: float, states: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the divergence [n] of every held-out input under the fit without its fold, and these fits."""
        losses = torch.empty(len(self.held), dtype=torch.float64)
        ends = list(states or [self._zeros(train) for train, _ in self._folds])
        for number, (train, test) in enumerate(self._folds):
            if not math.isinf(strength):
                ends[number] = self._minimised(train, self._prior(strength), ends[number], _ROUGH).G
            losses[number :: len(self._folds)] = test.divergence(ends[number]).cpu()
        return losses, ends

    @cached_property
    def _folds(self) -> list[tuple[Rows, Rows]]:
        count = min(_FOLDS, len(self.held))
        number, folds = torch.arange(len(self.held)) % count, []
        for fold in range(count):
            train, test = (self._all.take(self.held[rows]) for rows in (number != fold, number == fold))
            if len(train.X) < train.X.shape[1]:  # fewer inputs than directions: a smaller basis
                basis = torch.linalg.qr(train.X.T)[0]
                train, test = replace(train, X=train.X @ basis), replace(test, X=test.X @ basis)
            folds.append((train, test))
        return folds

    def _ridge(self, rows: torch.Tensor) -> torch.Tensor:
        """G of ridge on some rows, with the strength chosen on all."""
        problem, X = self._problem, self._all.X[rows]
        if math.isinf(problem.strength):
            return self._zeros(self._all)
        A = X.T @ X
        A.diagonal().add_(problem.strength * problem.spectrum.unit * len(rows) / len(self._order))
        moment = X.T @ problem.residual[rows].to(self._device)
        return torch.cholesky_solve(moment, torch.linalg.cholesky(A)).T

    def _minimised(self, rows: Rows, prior: float, start: torch.Tensor, tolerance: float) -> Fit:
        fit = rows.minimised(prior, start, tolerance=tolerance, steps=self._steps)
        if not math.isfinite(fit.value):
            raise NumericalError(f"kl-map diverged on {self._problem.task!r}; raise its strength, or use 'ridge'")
        return fit

    def _zeros(self, rows: Rows) -> torch.Tensor:
        return rows.X.new_zeros(rows.base.shape[1], rows.X.shape[1])

    def _starts(self, prior: float) -> list[torch.Tensor]:
        """Least squares fits, with one curvature for all inputs and classes instead of the divergence's."""
        spectrum, R = self._problem.spectrum, self._problem.residual
        moment = (spectrum.U.T @ R).T * spectrum.s
        q = self._all.target.exp()
        curvature = float((q - q.square()).mean())
        sizes = (size for size in (1.0, curvature) if size > 0)
        return [(moment / (spectrum.s.square() + prior / size)).to(self._device) for size in sizes]

    def _prior(self, strength: float) -> float:
        return max(strength, 1e-9) * self._unit
