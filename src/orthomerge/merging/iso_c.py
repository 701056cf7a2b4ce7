"""Iso-C: add the task vectors up and make all directions of the sum equally strong.

Marczak et al., "No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces", 2025,
arXiv 2502.04959.

Per matrix: X = sum_t tau_t = U diag(s) V^T; delta = scale * mean(s) * U V^T. Tensors that are no matrices get
scale * mean of the task vectors.

Letters: T experts; tau_t, X, W [m, k]; W = U V^T, the polar factor of X; s its singular values.
Differs from the paper: a sum without full rank keeps its rank, and mean(s) is over the directions that it
has; the authors' code fills the null space with directions that are arbitrary but as strong as the rest. The
authors' code averages a CLIP `text_projection`; here it is a matrix like any other.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import finite
from orthomerge.merging.polar import is_table, polar


@dataclass(frozen=True)
class IsoC:
    """`scale`: alpha, for all tensors alike. `embeddings`: False averages token and position tables."""

    scale: float = 1.5
    embeddings: bool = True

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        finite("scale", self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if base.ndim != 2 or (is_table(site.key) and not self.embeddings):
            return deltas.mean(0) * self.scale
        return isotropic(deltas.sum(0, dtype=torch.float64), scale=self.scale, key=site.key)


def isotropic(X: torch.Tensor, *, scale: float, key: str) -> torch.Tensor:
    """Iso-C of a sum: scale * mean(s) * U V^T, in float32."""
    W = polar(X, key=key)
    rank = W.square().sum()
    if not rank:
        return torch.zeros_like(X, dtype=torch.float32)
    mean = (W * X).sum() / rank  # <W, X> = trace(V U^T U diag(s) V^T) = sum(s)
    return (W * (scale * mean)).float().contiguous()
