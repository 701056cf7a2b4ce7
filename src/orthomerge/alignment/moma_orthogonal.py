"""The rotation from merged to expert's features by gradient and penalty, to compare with the closed form.

Kong et al. 2026, "MOMA: Masked Orthogonal Matrix Alignment for Zero-Additional-Parameter Model Merging", Eq. 8, arXiv
2412.13526 v3. From A = I, Adam minimises

    mean over x of ||A h - t||_2  +  alpha ||A^T A - I||_F,

and A goes into the head's first linear map: W A. Procrustes (`orthogonal`) has the optimum of the squared distances
over exactly orthogonal matrices, at once and without a choice to make.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert, rows h and t; A [d, d]; S = A^T A - I;
W [m, d] the head's first linear map.
Differs from the paper: Eq. 8 sums over inputs, and so would weigh the penalty by their number; the mean is Eq. 10's.
The paper gives Adam, lr 1e-3 and batches of 16 (5e-4 and 24 for text), but not alpha, the start, the number of steps or
what becomes of A: 1, the identity, 1000, a learning rate that falls to zero along a cosine, and at the end (`project`)
the nearest orthogonal matrix are ours. Alpha weighs the penalty against distances on the scale of the encoder's
features; a head that normalises reads unit vectors, and A acts on those, so that folding it is exact. There H and T
are the unit vectors times the mean norm of the expert's features, which keeps the balance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.descent import Adam
from orthomerge.alignment.folding import folded
from orthomerge.alignment.orth_m import excess
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import polar_factor
from orthomerge.core.checks import not_negative
from orthomerge.models.extract import device_of
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head


@dataclass(frozen=True)
class MomaOrthogonal:
    """`alpha`: weight of the penalty; `project`: end with the nearest orthogonal matrix; `seed`: order of the inputs.

    `steps`, `lr`, `batch`: Adam's; `decay`: the learning rate falls to zero along a cosine; `device`: where it is
    trained.
    """

    alpha: float = 1.0
    project: bool = True
    steps: int = 1000
    lr: float = 1e-3
    batch: int = 16
    decay: bool = True
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        not_negative(alpha=self.alpha)
        self._adam()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: mean distance to the expert's features before and after, and ||S||_F before any projection."""
        problem = Problem.of(pair, head)
        scale = float(pair.expert.values.double().norm(dim=1).mean()) if head.normalise else 1.0
        H, T = problem.H * scale, problem.T * scale
        A = self._train(H, T, task=problem.task)
        defect = float(excess(A).norm())
        if self.project:
            A = polar_factor(A, task=problem.task)
        before, after = (float((found - T).norm(dim=1).mean()) for found in (H, H @ A.T))
        facts = {"loss_before": before, "loss": after, "defect": defect}
        return Alignment(folded(head, A, task=problem.task), facts)

    def _train(self, H: torch.Tensor, T: torch.Tensor, *, task: str) -> torch.Tensor:
        """A [d, d] in float64."""
        place = device_of(self.device)
        H, T = (values.float().to(place) for values in (H, T))
        A = torch.eye(H.shape[1], device=place)

        def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
            h = H[rows]
            R = h @ A.T - T[rows]
            found = torch.nn.functional.normalize(R, dim=1).div_(len(rows)).T @ h
            S = excess(A)
            # d||S||_F/dA = 2 A S / ||S||_F, and 0 at the kink S = 0.
            return [found.addcdiv_(A @ S, S.norm().clamp_min_(1e-12), value=2 * self.alpha)]

        name = f"the matrix of {task!r} diverged under moma-orthogonal"
        generator = torch.Generator().manual_seed(self.seed)
        self._adam().minimise([A], gradients, count=len(H), generator=generator, name=name)
        return A.cpu().double()

    def _adam(self) -> Adam:
        return Adam(self.steps, self.lr, self.batch, self.decay, self.seed)
