"""MOMA's objective, Eq. 10: features, mapped by a matrix per task, compared with the expert's.

    sum_t mean_x || A_t g(x) - g_t(x) ||  +  alpha sum_t || A_t^T A_t - I ||

`norm` is of an input's difference: l2 (Euclidean, as Eq. 10 reads), l1 (mean over features, Surgery's code) or mse.
`penalty` is of the excess: fro (Frobenius), fro2 (its square) or l1 (sum; FT-Classifier). A `similarity` is a factor
times an orthogonal map; a `linear` map has no penalty; `none` leaves the features as they are.

A acts on what the head reads: features, or for a head that normalises (CLIP) those of unit length, times the mean norm
of the expert's so that alpha means the same; then folding it into the head is exact.

Letters: A [d, d] of a task; features g, g_t [n, d].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import normalize

from orthomerge.alignment.folding import folded
from orthomerge.alignment.rigid import polar_factor
from orthomerge.fitting.objective import Objective
from orthomerge.models.heads import Classifier, Head

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs, Targets


Transform = Literal["none", "orthogonal", "similarity", "linear"]
Norm = Literal["l2", "l1", "mse"]
Penalty = Literal["fro", "fro2", "l1"]

_TINY = 1e-24  # gives a root a gradient at zero


class FeatureDistance(Objective):
    """`maps`: A by task; `factors`: logarithms of the factors of similarities, by task. `lr`: of both."""

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
        super().__init__(heads, lr=lr)
        self._transform, self._norm, self._form, self._alpha = transform, norm, penalty, alpha
        features = {task: inputs.targets[task].features for task in heads}
        self._lengths = {task: features[task].norm(dim=1).mean() for task, head in heads.items() if head.normalise}
        self.maps = {task: torch.eye(own.shape[1], device=own.device) for task, own in features.items()}
        self.factors = {task: torch.zeros((), device=own.device) for task, own in features.items()}
        if transform != "none":
            self.parameters += (A.requires_grad_() for A in self.maps.values())
        if transform == "similarity":
            self.parameters += (factor.requires_grad_() for factor in self.factors.values())

    def terms(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        mapped, target = self._read(features, task), self._read(targets.features, task)
        if self._transform != "none":
            mapped = mapped @ self.maps[task].T
        if self._transform == "similarity":
            mapped = mapped * self.factors[task].exp()
        gap = mapped - target
        if self._norm == "l2":
            return (gap.square().sum(-1) + _TINY).sqrt()
        return gap.abs().mean(-1) if self._norm == "l1" else gap.square().mean(-1)

    def penalty(self) -> torch.Tensor | None:
        if self._transform in ("none", "linear") or not self._alpha:
            return None
        return self._alpha * torch.stack([self._size(_excess(A)) for A in self.maps.values()]).sum()

    def classifiers(self) -> dict[str, Classifier]:
        """W' = W A, for every kind of map."""
        if self._transform == "none":
            return dict(self._heads)
        maps = {task: A.detach().double() * self.factors[task].detach().double().exp() for task, A in self.maps.items()}
        return {task: folded(head, maps[task].cpu(), task=task) for task, head in self._heads.items()}

    def measures(self) -> dict[str, float]:
        """`defect`: the mean of ||A^T A - I||_F over tasks."""
        if self._transform == "none":
            return {}
        with torch.no_grad():
            return {"defect": float(torch.stack([_excess(A).norm() for A in self.maps.values()]).mean())}

    @torch.no_grad()
    def project(self) -> None:
        """Put the nearest orthogonal matrix in the place of each A."""
        for task, A in self.maps.items():
            A.copy_(polar_factor(A.double().cpu(), task=task))

    def _read(self, features: torch.Tensor, task: str) -> torch.Tensor:
        """What the task's head reads of features."""
        return normalize(features, dim=-1) * self._lengths[task] if task in self._lengths else features

    def _size(self, excess: torch.Tensor) -> torch.Tensor:
        if self._form == "l1":
            return excess.abs().sum()
        squares = excess.square().sum()
        return squares if self._form == "fro2" else (squares + _TINY).sqrt()


def _excess(A: torch.Tensor) -> torch.Tensor:
    """A^T A - I."""
    return A.T @ A - torch.eye(len(A), device=A.device)
