"""A square matrix between merged features and the frozen head, as in aligned-m, held near the orthogonal ones.

Kong et al. 2024, "Rethink the Evaluation Protocol of Model Merging on Classification Task", Eq. 9 (Orth M), arXiv
2412.13526 v1. From M = I, Adam minimises

    mean over x of KL(softmax(head(T)) || softmax(head(M H)))  +  alpha sum over entries of |M^T M - I|.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert; M [d, d]; S = M^T M - I.
Differs from the paper: it gives neither alpha nor the optimiser. The penalty is printed as a norm with index 1 and read
as the sum over entries, not as the largest sum of a column. It has d^2 terms, each as steep at 0.001 as at 1, so that a
small alpha ends at an orthogonal matrix and a large one freezes M near I: 1e-2 is ours, the smallest power of ten that
left no defect with 64 features (with 512 a tenth of it does). The optimiser is aligned-m's with half the steps, each of
which multiplies [d, d] matrices. `project` (off, as printed) ends with the orthogonal matrix nearest to M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orthomerge.alignment.aligned_m import losses, train_matrix
from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.descent import Adam
from orthomerge.alignment.folding import folded
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import polar_factor
from orthomerge.core.checks import not_negative
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head


@dataclass(frozen=True)
class OrthM:
    """`alpha`: weight of the penalty; `project`: end with the nearest orthogonal matrix; the rest as in aligned-m.

    `device`: where it is trained.
    """

    alpha: float = 1e-2
    project: bool = False
    steps: int = 1000
    lr: float = 2e-3
    batch: int = 64
    decay: bool = True
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        not_negative(alpha=self.alpha)
        self._adam()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the divergence before and after, and the defect ||S||_F of what was trained, before any projection."""
        problem = Problem.of(pair, head)
        M = train_matrix(
            problem,
            self._adam(),
            device=self.device,
            name=f"the matrix of {problem.task!r} diverged under orth-m",
            penalty=self._penalty if self.alpha else None,
        )
        defect = float(excess(M).norm())
        if self.project:
            M = polar_factor(M, task=problem.task)
        return Alignment(folded(head, M, task=problem.task), losses(problem, M) | {"defect": defect})

    def _adam(self) -> Adam:
        return Adam(self.steps, self.lr, self.batch, self.decay, self.seed)

    def _penalty(self, M: torch.Tensor) -> torch.Tensor:
        """Gradient of alpha sum |S|: 2 alpha M sign(S), as S is symmetric."""
        return (M @ excess(M).sign_()).mul_(2 * self.alpha)


def excess(M: torch.Tensor) -> torch.Tensor:
    """S = M^T M - I."""
    S = M.T @ M
    S.diagonal().sub_(1)
    return S
