"""Representation surgery: a small module between encoder and head that corrects the features.

Yang et al. 2024, "Representation Surgery for Multi-Task Model Merging", arXiv 2402.02705, and its code:

    surgery        f' = f - U relu(D f),    Adam on the mean over inputs and entries of |f' - t|

Wei et al. 2025, "Representation Surgery in Model Merging with Probabilistic Modeling", ICML (PMLR 267; not on arXiv),
and its code: the correction is drawn from a normal distribution while it is trained, and is its mean afterwards,

    probsurgery    h = relu(D f),  mu = U h,  log sigma^2 = V h,  f' = f - mu - sigma e,  e ~ N(0, I),

and Adam on the same loss plus beta times the mean over inputs of KL(N(mu, sigma^2) || N(0, I)).

Both start from U = V = 0, the merged model.

Letters: f, t [n, d] features of merged encoder and expert, not normalised; D [r, d]; U, V [d, r]; v = log sigma^2.
Differs from the papers: one optimiser per task; epochs go through all inputs, where the code takes two batches of a new
shuffle in each of 500 rounds; inputs are the caller's, not the test set. The result of probsurgery is the last step's;
the authors' code evaluates on the test set 50 times and reports the best.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.descent import Descent
from orthomerge.alignment.problem import Problem
from orthomerge.core.checks import at_least_one, not_negative
from orthomerge.core.device import device_of
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head, SurgeryHead

_AHEAD = 50  # steps for which noise is drawn at once

Gradients = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of the layers, from x and t


@dataclass(frozen=True)
class Surgery(Descent):
    """`rank`: r; `steps`, `lr`, `batch`, `decay`: Adam's; `seed`: of D and batches; `device`: where it is trained."""

    decay: bool = False
    rank: int = 16

    def __post_init__(self) -> None:
        at_least_one(rank=self.rank)
        super().__post_init__()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean absolute distance to the expert's features before and after."""
        generator = torch.Generator().manual_seed(self.seed)
        weights = _start(2, self.rank, head.width, generator).to(device_of(self.device))
        D, U = weights  # U is transposed

        def gradients(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            h = (x @ D.T).relu_()
            G = (t - x).add_(h @ U).sign_().div_(x.numel())  # dloss / d(U h)
            return torch.stack([((G @ U.T) * (h > 0)).T @ x, h.T @ G])

        return _trained(self, pair, head, weights, gradients, generator, "surgery")


@dataclass(frozen=True)
class ProbSurgery(Descent):
    """`width`: r; `beta`: weight of the KL term; `seed`: of D, the batches and the noise.

    `steps`, `lr`, `batch`, `decay`: Adam's; `device`: where it is trained, which noise depends on.
    """

    steps: int = 5000
    decay: bool = False
    width: int = 128
    beta: float = 1e-4

    def __post_init__(self) -> None:
        at_least_one(width=self.width)
        not_negative(beta=self.beta)
        super().__post_init__()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean absolute distance to the expert's features before and, without noise, after."""
        generator, place = torch.Generator().manual_seed(self.seed), device_of(self.device)
        weights = _start(3, self.width, head.width, generator).to(place)
        D, U, V = weights  # U and V are transposed
        drawn = _noise(generator, min(self.batch, len(pair.merged)), head.width, place)

        def gradients(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            h = (x @ D.T).relu_()
            mu, v = h @ U, h @ V
            noise = next(drawn)[: len(x)] * (v / 2).exp()
            G = (t - x + mu + noise).sign_().div_(x.numel())
            weight = self.beta / len(x)
            to_mu = G + weight * mu
            to_v = G.mul_(noise).add_(v.exp().sub_(1), alpha=weight).div_(2)
            to_h = (to_mu @ U.T + to_v @ V.T) * (h > 0)
            return torch.stack([to_h.T @ x, h.T @ to_mu, h.T @ to_v])

        return _trained(self, pair, head, weights, gradients, generator, "probsurgery")


def first_layer(rank: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a [rank, width] matrix like torch's linear layers: uniform up to 1 / sqrt(width)."""
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


def _start(layers: int, rank: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Initial layers [layers, r, d] of a module: D random, the others zero."""
    return torch.stack([first_layer(rank, width, generator), *torch.zeros(layers - 1, rank, width)])


def _noise(fit: torch.Generator, batch: int, width: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield normal noise [batch, width] for every step, with a seed drawn from `fit`."""
    generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=fit)))
    while True:
        yield from torch.randn(_AHEAD, batch, width, generator=generator, device=device)


def _trained(
    adam: Descent,
    pair: FeaturePair,
    head: Head,
    weights: torch.Tensor,
    gradients: Gradients,
    generator: torch.Generator,
    kind: str,
) -> Alignment:
    task = Problem.of(pair, head).task  # also checks the features
    f, t = pair.merged.values.float(), pair.expert.values.float()
    x, target = f.to(weights.device), t.to(weights.device)
    adam.minimise(
        [weights],
        lambda rows: [gradients(x[rows], target[rows])],
        count=len(f),
        name=f"the module of {task!r} diverged under {kind}",
        generator=generator,
    )
    D, U = weights[0].cpu().clone(), weights[1].cpu().T.contiguous()
    corrected = f - (f @ D.T).relu_() @ U.T
    before, after = (float((values.double() - t.double()).abs().mean()) for values in (f, corrected))
    return Alignment(SurgeryHead(head, D, U, kind), {"loss_before": before, "loss": after})
