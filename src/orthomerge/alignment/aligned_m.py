"""A square matrix between frozen merged features and the frozen head, trained until the outputs are the expert's.

Kong et al. 2024, "Rethink the Evaluation Protocol of Model Merging on Classification Task", Eq. 7 (Aligned M), arXiv
2412.13526 v1. From M = I and on unlabelled inputs, Adam minimises

    mean over x of KL(softmax(head(T)) || softmax(head(M H))),

and M goes into the head's first linear map: W M, not one parameter more.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert; M [d, d]; W [m, d] the head's first
linear map; q [n, C] the expert's probabilities. (The paper writes features as rows, H M W: its M is our M transposed.)
Differs from the paper: it gives no optimiser, learning rate, batch or length. Adam, 2000 steps of 64 inputs and lr 2e-3
falling to zero along a cosine are ours. For heads that normalise (CLIP) M acts on the unit vectors that the head reads,
and what comes out is not scaled to unit length again, so that folding M is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.descent import Adam
from orthomerge.alignment.distillation import divergence, input_gradient, plain
from orthomerge.alignment.folding import folded, logits_from
from orthomerge.alignment.problem import Problem
from orthomerge.models.extract import device_of
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head


@dataclass(frozen=True)
class AlignedM:
    """`steps`, `lr`, `batch`: Adam's; `decay`: the learning rate falls to zero; `seed`: of the order of the inputs.

    `device`: where it is trained.
    """

    steps: int = 2000
    lr: float = 2e-3
    batch: int = 64
    decay: bool = True
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._adam()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean divergence from the expert's outputs before and after."""
        problem = Problem.of(pair, head)
        name = f"the matrix of {problem.task!r} diverged under aligned-m"
        M = train_matrix(problem, self._adam(), device=self.device, name=name)
        return Alignment(folded(head, M, task=problem.task), losses(problem, M))

    def _adam(self) -> Adam:
        return Adam(self.steps, self.lr, self.batch, self.decay, self.seed)


def train_matrix(
    problem: Problem,
    adam: Adam,
    *,
    device: str,
    name: str,
    penalty: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """M [d, d] in float64; `penalty(M)` is the gradient of what is added to the divergence."""
    place = device_of(device)
    H, q = (values.float().to(place) for values in (problem.H, problem.Z.softmax(1)))
    head, M = plain(problem.head, place), torch.eye(H.shape[1], device=place)

    def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
        x = H[rows]
        found = input_gradient(head, x @ M.T, q[rows]).T @ x
        return [found if penalty is None else found.add_(penalty(M))]

    generator = torch.Generator().manual_seed(adam.seed)
    adam.minimise([M], gradients, count=len(H), generator=generator, name=name)
    return M.cpu().double()


def losses(problem: Problem, M: torch.Tensor) -> dict[str, float]:
    """The mean divergence from the expert's outputs without M and with it."""
    before, after = (divergence(problem.Z, logits_from(problem.head, x)) for x in (problem.H, problem.H @ M.T))
    return {"loss_before": before, "loss": after}
