"""Square matrix before the frozen head, trained by Adam from the identity and folded into the head.

Kong et al. 2024, "Rethink the Evaluation Protocol of Model Merging on Classification Task", arXiv 2412.13526 v1:

    aligned-m, Eq. 7    mean over x of KL(softmax(head(T)) || softmax(head(M H)))
    orth-m, Eq. 9       the same  +  alpha sum over entries of |M^T M - I|

Kong et al. 2026, "MOMA: Masked Orthogonal Matrix Alignment for Zero-Additional-Parameter Model Merging", v3 of it:

    moma-orthogonal, Eq. 8    mean over x of ||M H - T||_2  +  alpha ||M^T M - I||_F

Procrustes (`orthogonal`) has the optimum of the squared distances over orthogonal matrices in closed form.

Letters: H, T [n, d] the head's inputs from the merged encoder and from the expert; M [d, d]; S = M^T M - I; W [m, d]
the head's first linear map; q [n, C] the expert's probabilities. (The papers write features as rows, H M W: their M is
ours transposed; Eq. 8 calls it A.)
Differs from the papers: v1 gives no optimiser, learning rate, batch, length or alpha; 2000 steps (1000 for orth-m) of
64 inputs and lr 2e-3 falling to zero along a cosine are ours. For heads that normalise (CLIP) M acts on unit vectors,
and the result is not normalised again, so that folding M is exact. Eq. 9's penalty is read as the sum over entries, not
as the largest sum of a column; its alpha of 1e-2 is the smallest power of ten that left no defect with 64 features.
Eq. 8 sums over inputs; the mean is Eq. 10's. v3 gives Adam, lr 1e-3 and batches of 16 (5e-4 and 24 for text); alpha 1,
the identity as start, 1000 steps, a cosine, and at the end (`project`) the nearest orthogonal matrix are ours. Where
the head normalises, moma-orthogonal takes H and T times the mean norm of the expert's features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import normalize

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.descent import Descent
from orthomerge.alignment.folding import folded, logits_from
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import polar_factor
from orthomerge.core.checks import not_negative
from orthomerge.core.device import device_of
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head

Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of M, on some rows
Loss = Callable[[Problem, torch.Tensor], float]  # of mapped inputs [n, d]


@dataclass(frozen=True)
class AlignedM(Descent):
    """`steps`, `lr`, `batch`, `decay`: Adam's; `seed`: of the order of the inputs; `device`: where it is trained."""

    steps: int = 2000
    lr: float = 2e-3
    batch: int = 64

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean divergence from the expert's outputs before and after."""
        problem = Problem.of(pair, head)
        M = trained(self, problem, divergence_gradient(problem, self.device), name="aligned-m")
        return _aligned(problem, M, _divergence)


@dataclass(frozen=True)
class _NearOrthogonal(Descent):
    alpha: float = 1.0
    project: bool = True

    def __post_init__(self) -> None:
        not_negative(alpha=self.alpha)
        super().__post_init__()

    def finished(self, problem: Problem, M: torch.Tensor, loss: Loss) -> Alignment:
        """Fold M or, with `project`, the nearest orthogonal matrix, and add the defect of M to the facts."""
        nearest = polar_factor(M, task=problem.task) if self.project else M
        return _aligned(problem, nearest, loss, defect=float(excess(M).norm()))


@dataclass(frozen=True)
class OrthM(_NearOrthogonal):
    """`alpha`: weight of the penalty; `project`: end with the nearest orthogonal matrix (off, as printed).

    `steps`, `lr`, `batch`, `decay`: Adam's; `seed`: of the order of the inputs; `device`: where it is trained.
    """

    lr: float = 2e-3
    batch: int = 64
    alpha: float = 1e-2
    project: bool = False

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the divergence before and after, and the defect ||S||_F before any projection."""
        problem = Problem.of(pair, head)
        divergence = divergence_gradient(problem, self.device)

        def gradient(M: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            # d(sum |S|)/dM = 2 M sign(S), as S is symmetric.
            return divergence(M, rows).add_((M @ excess(M).sign_()).mul_(2 * self.alpha))

        M = trained(self, problem, gradient if self.alpha else divergence, name="orth-m")
        return self.finished(problem, M, _divergence)


@dataclass(frozen=True)
class MomaOrthogonal(_NearOrthogonal):
    """`alpha`: weight of the penalty; `project`: end with the nearest orthogonal matrix.

    `steps`, `lr`, `batch`, `decay`: Adam's; `seed`: of the order of the inputs; `device`: where it is trained.
    """

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: mean distance to the expert's features before and after, and ||S||_F before any projection."""
        problem = Problem.of(pair, head)
        scale = float(pair.expert.values.double().norm(dim=1).mean()) if head.normalise else 1.0
        h, t = ((values * scale).float().to(device_of(self.device)) for values in (problem.H, problem.T))

        def distance(problem: Problem, mapped: torch.Tensor) -> float:
            return float((mapped - problem.T).norm(dim=1).mean()) * scale

        def gradient(A: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            R = h[rows] @ A.T - t[rows]
            S = excess(A)
            # d||S||_F/dA = 2 A S / ||S||_F, and 0 at the kink S = 0.
            of_distance = normalize(R, dim=1).div_(len(rows)).T @ h[rows]
            return of_distance.addcdiv_(A @ S, S.norm().clamp_min_(1e-12), value=2 * self.alpha)

        return self.finished(problem, trained(self, problem, gradient, name="moma-orthogonal"), distance)


def trained(adam: Descent, problem: Problem, gradient: Gradient, *, name: str) -> torch.Tensor:
    """Train M [d, d] from the identity, and return it in float64."""
    M = torch.eye(problem.H.shape[1], device=device_of(adam.device))
    adam.minimise(
        [M],
        lambda rows: [gradient(M, rows)],
        count=len(problem.H),
        name=f"the matrix of {problem.task!r} diverged under {name}",
    )
    return M.cpu().double()


def divergence_gradient(problem: Problem, device: str) -> Gradient:
    place = device_of(device)
    H, q = (values.float().to(place) for values in (problem.H, problem.Z.softmax(1)))
    reader = replace(problem.head.to(place, torch.float32), normalise=False)  # H is normalised where the head does it

    def gradient(M: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return input_gradient(reader, H[rows] @ M.T, q[rows]).T @ H[rows]

    return gradient


def input_gradient(head: Head, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean divergence in x [B, d], for a head that does not normalise: dKL/dz = p - q."""
    h = x if head.hidden is None else head.hidden(x).requires_grad_()
    activations = h if head.activation is None else getattr(torch.nn.functional, head.activation)(h)
    with torch.no_grad():
        gradient = head.output(activations).softmax(-1).sub_(q).div_(len(x)) @ head.output.weight
    if head.hidden is None:
        return gradient
    return torch.autograd.grad(activations, h, gradient)[0] @ head.hidden.weight


def excess(M: torch.Tensor) -> torch.Tensor:
    S = M.T @ M
    S.diagonal().sub_(1)
    return S


def _aligned(problem: Problem, M: torch.Tensor, loss: Loss, **facts: float) -> Alignment:
    losses = {"loss_before": loss(problem, problem.H), "loss": loss(problem, problem.H @ M.T)}
    return Alignment(folded(problem.head, M, task=problem.task), {**losses, **facts})


def _divergence(problem: Problem, mapped: torch.Tensor) -> float:
    return problem.divergence(logits_from(problem.head, mapped))
