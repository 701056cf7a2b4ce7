"""Inputs of aligners, and the ridge regression that all linear aligners solve.

With X = [H, a 1] and the residual R = (T - H) W^T:

    D = argmin ||X D - R||^2 + lambda ||D||^2 = (X^T X + lambda I)^-1 X^T R,     W' = W + D_1..d^T,  b' = b + a D_d+1.

A linear map A = I + (T^T H - C) (C + lambda I)^-1 gives the same head W A. a: the size of a typical feature.

Leave-one-out costs one decomposition X = U diag(s) V^T for all strengths: the error of input i, fitted without it, is
its residual over 1 - h_i with the leverage h_i = sum_k U_ik^2 s_k^2 / (s_k^2 + lambda). Of all strengths within one
standard error (paired, over inputs) of the best, the largest is taken; infinity means no change.

Letters: H, T [n, d] the head's inputs from the merged encoder and from the expert; Z [n, C] the expert's logits; W [m,
d] the head's first linear map; C = H^T H; lambda = strength times the mean eigenvalue of X^T X.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.folding import centred_rows, first_map, logits_from, read_by, with_first_map
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head, head_kind

STRENGTHS = (math.inf, *(10 ** (power / 2) for power in range(8, -13, -1)))
_TINY = 1e-13  # share of the largest eigenvalue below which one is rounding


@dataclass(frozen=True, eq=False)
class Spectrum:
    """X = U diag(s) V^T of full rank; `unit`: mean eigenvalue of X^T X; `a`: size of the ones."""

    U: torch.Tensor
    s: torch.Tensor
    V: torch.Tensor
    unit: float
    a: float

    @classmethod
    def of(cls, H: torch.Tensor, *, biased: bool) -> Spectrum:
        """Decompose X by the smaller of X^T X and X X^T; `biased`: whether it has the column of ones."""
        n, d = H.shape
        a = float(torch.linalg.vector_norm(H)) / math.sqrt(n * d) if biased else 0.0
        X = torch.cat([H, H.new_full((n, 1), a)], 1) if biased else H
        few = n < X.shape[1]
        values, vectors = torch.linalg.eigh(X @ X.T if few else X.T @ X)
        kept = values > _TINY * values[-1]
        s, basis = values[kept].sqrt(), vectors[:, kept]
        unit = float(values.clamp_min(0).sum()) / X.shape[1]
        return cls(basis, s, X.T @ (basis / s), unit, a) if few else cls(X @ (basis / s), s, basis, unit, a)

    def shrinkage(self, strength: float) -> torch.Tensor:
        """s^2 / (s^2 + lambda), [r]."""
        return torch.zeros_like(self.s) if math.isinf(strength) else self.s**2 / (self.s**2 + strength * self.unit)

    def change(self, R: torch.Tensor, strength: float) -> torch.Tensor:
        """D^T of the ridge regression to R [n, m]: [m, d] or, with a bias, [m, d + 1], the last in units of a."""
        return self.shrinkage(strength) / self.s * (R.T @ self.U) @ self.V.T

    def leave_one_out(self, R: torch.Tensor, strength: float) -> torch.Tensor:
        """Error [n, m] of every input under the fit to all others."""
        f = self.shrinkage(strength)
        fitted = self.U @ (f[:, None] * (self.U.T @ R))
        leverage = self.U.square() @ f
        return (R - fitted) / (1 - leverage).clamp_min(1e-9)[:, None]


@dataclass(frozen=True, eq=False)
class Problem:
    """A pair of features and the expert's head; several aligners share one decomposition. `task` is for messages."""

    H: torch.Tensor
    T: torch.Tensor
    head: Head
    task: str

    @classmethod
    def of(cls, pair: FeaturePair, head: Head) -> Problem:
        """Check number, finiteness and width of the features."""
        if not len(pair.merged):
            raise RecipeError(f"an aligner needs at least one input of {pair.merged.task!r}, got 0")
        merged, expert = _checked(pair.merged, "merged", head), _checked(pair.expert, "expert's", head)
        return cls(read_by(head, merged), read_by(head, expert), head, pair.merged.task)

    @cached_property
    def Z(self) -> torch.Tensor:  # noqa: N802 - the letter of the legend
        return logits_from(self.head, self.T)

    def divergence(self, logits: torch.Tensor) -> float:
        """Mean divergence of logits [n, C] from the expert's."""
        return float(head_kind(self.head.kind).divergence(logits.double(), self.Z).mean())

    @cached_property
    def spectrum(self) -> Spectrum:
        return Spectrum.of(self.H, biased=self.biased)

    @cached_property
    def unshifted(self) -> Spectrum:
        return Spectrum.of(self.H, biased=False) if self.biased else self.spectrum

    @cached_property
    def strength(self) -> float:
        """Strength by leave-one-out; infinity, that is no change, for a single input."""
        if len(self.H) < 2:
            return math.inf
        losses = [self.spectrum.leave_one_out(self.residual, strength).square().sum(1) for strength in STRENGTHS]
        return STRENGTHS[near_best(torch.stack(losses))[0]]

    @cached_property
    def residual(self) -> torch.Tensor:
        """Difference T - H under the head's centred first map, [n, m]."""
        return (self.T - self.H) @ centred_rows(self.head).T

    @property
    def biased(self) -> bool:
        """Whether the first map has a bias, which can take up a shift of the features."""
        return first_map(self.head).bias is not None

    def changed(self, change: torch.Tensor) -> Head:
        """Add D^T [m, d] to the head's first map or, with a bias, [m, d + 1], the last in units of a."""
        first, d = first_map(self.head), self.head.width
        bias = first.bias
        if bias is not None and change.shape[1] > d:
            bias = bias.double() + self.spectrum.a * change[:, d]
        return with_first_map(self.head, first.weight.double() + change[:, :d], bias, task=self.task)


class Solved:
    """An aligner that starts from a `Problem`."""

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return self.align(Problem.of(pair, head))

    def align(self, problem: Problem) -> Alignment:
        raise NotImplementedError


def _checked(features: Features, who: str, head: Head) -> torch.Tensor:
    if features.values.shape[1] != head.width:
        raise IncompatibleError(
            f"the head of {features.task!r} reads {head.width} features but the {who} are {features.values.shape[1]}"
        )
    finite = features.values.isfinite().all(1)
    if not finite.all():
        raise NumericalError(
            f"{int((~finite).sum())} of {len(features)} {who} features of {features.task!r} are NaN or infinite; "
            "check the encoder that computed them"
        )
    return features.values.double()


def near_best(losses: torch.Tensor) -> list[int]:
    """Choices whose mean loss is within one standard error (paired) of the best; losses [choices, n]."""
    excess = losses - losses[int(losses.mean(1).argmin())]
    near = excess.mean(1) <= excess.std(1, correction=1) / math.sqrt(losses.shape[1])
    return [int(place) for place in near.nonzero()]


def check_strength(name: str, value: float | Literal["auto"]) -> None:
    """Refuse a strength that is neither at least 0 (infinity: no change) nor `auto`."""
    if value != "auto" and (math.isnan(value) or value < 0):
        raise RecipeError(f"{name!r} must be 0 or more, or auto, got {value!r}")
