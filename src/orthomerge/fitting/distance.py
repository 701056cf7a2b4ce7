"""MOMA's objective, Eq. 10: features, carried over by a map of each task's own, at the expert's.

    sum_t mean_x || A_t g(x) - g_t(x) ||  +  alpha sum_t || A_t^T A_t - I ||

`norm` is of an input's difference: l2 (Euclidean, as Eq. 10 reads), l1 (mean over features, Surgery's code) or mse.
`penalty` is of the excess: fro (Frobenius), fro2 (its square) or l1 (sum; FT-Classifier). A `similarity` is a factor
times an orthogonal map; a `linear` map has no penalty; `none` leaves the features as they are.

A acts on what the head reads: features, or for a head that normalises (CLIP) those of unit length, times the mean norm
of the expert's so that alpha means the same; then folding it into the head is exact.

Letters: A [T, d, d]; features g, g_t [T, B, d]; s [T] the factor of a similarity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import normalize

from orthomerge.alignment.folding import folded
from orthomerge.alignment.rigid import polar_factor
from orthomerge.models.heads import Classifier, Head

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs, Targets


Transform = Literal["none", "orthogonal", "similarity", "linear"]
Norm = Literal["l2", "l1", "mse"]
Penalty = Literal["fro", "fro2", "l1"]


class FeatureDistance:
    """See the module. `lr`: of Adam, for A."""

    def __init__(
        self,
        heads: Mapping[str, Head],
        inputs: Inputs,
        *,
        transform: Transform,
        norm: Norm,
        penalty: Penalty,
        alpha: float,
        lr: float,
    ) -> None:
        self.inputs, self._heads, self._tasks = inputs, dict(heads), list(heads)
        self._transform, self._norm, self._form, self._alpha = transform, norm, penalty, alpha
        self._teacher = torch.cat([inputs.targets[task].features for task in heads])
        self._weights = torch.cat([inputs.targets[task].weights for task in heads])
        self.lr, width, device = lr, self._teacher.shape[1], inputs.device
        self._eye = torch.eye(width, device=device)
        self._scales = torch.ones(len(heads), 1, 1, device=device)
        for number, (task, head) in enumerate(heads.items()):
            if head.normalise:
                self._scales[number] = inputs.targets[task].features.norm(dim=1).mean()
        unit = [head.normalise for head in heads.values()]
        self._unit = torch.tensor(unit, device=device)[:, None, None] if any(unit) else None
        self.A = self._eye.repeat(len(heads), 1, 1).requires_grad_(transform != "none")
        self.factors = torch.zeros(len(heads), device=device).requires_grad_(transform == "similarity")  # logarithms
        self.parameters = [] if transform == "none" else [self.A]
        if transform == "similarity":
            self.parameters.append(self.factors)

    def loss(self, features: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        there = numbers.to(features.device, non_blocking=True)
        seen, target = self._read(features), self._read(self._teacher[there])
        return (self._weights[there] * self._distance(self._mapped(seen) - target)).mean(1).sum()

    def penalty(self) -> torch.Tensor | None:
        if self._transform in ("none", "linear") or not self._alpha:
            return None
        return self._alpha * self._excess().sum()

    def judge(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        number = self._tasks.index(task)
        seen, target = (self._read(each[None], number) for each in (features, targets.features))
        return self._distance(self._mapped(seen, number) - target)[0]

    def classifiers(self) -> dict[str, Classifier]:
        """W' = W A, for every kind of map."""
        found: dict[str, Classifier] = {}
        for number, (task, head) in enumerate(self._heads.items()):
            map_ = self.A[number].detach().double() * self.factors[number].detach().double().exp()
            found[task] = head if self._transform == "none" else folded(head, map_.cpu(), task=task)
        return found

    def measures(self) -> dict[str, float]:
        """`defect`: the mean of ||A^T A - I||_F over tasks."""
        if self._transform == "none":
            return {}
        with torch.no_grad():
            return {"defect": float((self.A.mT @ self.A - self._eye).norm(dim=(1, 2)).mean())}

    def project(self) -> None:
        """Put the nearest orthogonal matrix in the place of each A."""
        with torch.no_grad():
            for number, task in enumerate(self._tasks):
                self.A[number] = polar_factor(self.A[number].double().cpu(), task=task).to(self.A)

    def _read(self, features: torch.Tensor, number: int | None = None) -> torch.Tensor:
        """What the heads read of features [T, B, d], or of one task's [1, B, d]."""
        if self._unit is None:
            return features
        unit, scales = (self._unit, self._scales) if number is None else (self._unit[number], self._scales[number])
        return torch.where(unit, normalize(features, dim=-1) * scales, features)

    def _mapped(self, seen: torch.Tensor, number: int | None = None) -> torch.Tensor:
        if self._transform == "none":
            return seen
        A = self.A if number is None else self.A[number][None]
        found = seen @ A.mT
        if self._transform == "similarity":
            factors = self.factors if number is None else self.factors[number][None]
            found = found * factors.exp()[:, None, None]
        return found

    def _distance(self, gap: torch.Tensor) -> torch.Tensor:
        if self._norm == "l2":
            return (gap.square().sum(-1) + 1e-24).sqrt()  # which has a gradient at zero
        return gap.abs().mean(-1) if self._norm == "l1" else gap.square().mean(-1)

    def _excess(self) -> torch.Tensor:
        excess = self.A.mT @ self.A - self._eye
        if self._form == "l1":
            return excess.abs().sum((1, 2))
        squares = excess.square().sum((1, 2))
        return squares if self._form == "fro2" else (squares + 1e-24).sqrt()
