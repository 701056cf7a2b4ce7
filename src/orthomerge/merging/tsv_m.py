"""TSV-Merge: share a matrix's rank among the experts, and make their singular vectors orthogonal.

Gargiulo et al., "Task Singular Vectors: Reducing Task Interference in Model Merging", 2025, arXiv 2412.00081.

Per matrix: tau_t = U_t diag(s_t) V_t^T, of which the first n = floor(r / T) directions are kept; their singular vectors
are concatenated and replaced by the nearest orthonormal ones, so that no expert's directions overlap with another's:

    delta = scale * polar([U_1 .. U_T]) diag(s_1 .. s_T) polar([V_1 .. V_T])^T.

Other tensors get scale * mean of the task vectors.

Letters: T experts; tau_t [m, k]; r = min(m, k); U_t [m, n], s_t [n], V_t [k, n].
Differs from the paper: with more experts than r each keeps one direction, where the authors' code returns zero.
Directions whose singular value is rounding are left out, not filled with arbitrary ones. The authors' code averages a
CLIP `text_projection`; here it is a matrix like any other.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.core.checks import finite
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.polar import joined, polar, svd


@dataclass(frozen=True)
class TsvM:
    """`scale`: alpha, for all tensors alike."""

    scale: float = 1.0

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        finite(scale=self.scale)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if len(deltas) == 1:  # all of the rank, nothing to interfere with: tau itself, bit for bit
            return deltas[0] * self.scale
        if base.ndim != 2:
            return deltas.mean(0) * self.scale
        n = max(min(base.shape) // len(deltas), 1)
        U, s, Vh = joined([svd(tau, key=site.key, top=n) for tau in deltas])
        return ((polar(U, key=site.key) * (self.scale * s)) @ polar(Vh, key=site.key)).float()
