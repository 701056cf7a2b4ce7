"""Surgery whose correction is drawn from a normal distribution while it is trained, and is its mean ever after.

Wei et al. 2025, "Representation Surgery in Model Merging with Probabilistic Modeling", ICML (PMLR 267; not on arXiv),
and its code:

    h = relu(D f),  mu = U h,  log sigma^2 = V h,  f' = f - mu - sigma e,  e ~ N(0, I),

and Adam on the mean over inputs and entries of |f' - t|, plus beta times the mean over inputs of KL(N(mu, sigma^2) ||
N(0, I)), from U = V = 0. Afterwards f' = f - U h, which is Surgery's module at eight times the width.

Letters: f, t [n, d] features of the merged encoder and of the expert, as they are, before a head normalises; D [w, d];
U, V [d, w]; v = log sigma^2.
Differs from the paper: V is not kept, because nothing reads it after training. What is returned is where training ends;
the authors' code evaluates on the test set 50 times and reports the best. It also has eight times Surgery's width and
five times its steps, so what the noise itself brings shows only beside Surgery with `rank` 128 and `steps` 5000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from orthomerge.alignment import surgery
from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.descent import Adam, at_least_one, not_negative
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.surgery import SurgeryHead, distance, first_layer
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["ProbSurgery", "rebuild"]

_KIND = "probsurgery"


def rebuild(head: Head, tensors: Mapping[str, torch.Tensor]) -> SurgeryHead:
    """The classifier from a head and the tensors that were kept beside the model."""
    return surgery.rebuild(head, tensors, kind=_KIND)


@dataclass(frozen=True)
class ProbSurgery:
    """`width`: w; `beta`: weight of the KL term; `seed`: of D, the batches and the noise.

    `steps`, `lr`, `batch`: Adam's; `decay`: the learning rate falls to zero along a cosine.
    """

    width: int = 128
    beta: float = 1e-4
    steps: int = 5000
    lr: float = 1e-3
    batch: int = 16
    decay: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(width=self.width)
        not_negative(beta=self.beta)
        self._adam()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean absolute distance to the expert's features before and, without noise, after."""
        task = Problem.of(pair, head).task  # for its checks
        f, t, adam = pair.merged.values.float(), pair.expert.values.float(), self._adam()
        generator = adam.generator()
        D = first_layer(self.width, head.width, generator)
        U, V = torch.zeros(2, head.width, self.width)

        def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
            x = f.index_select(0, rows)
            h = (x @ D.T).relu_()
            mu, v = h @ U.T, h @ V.T
            noise = torch.randn(x.shape, generator=generator).mul_((v / 2).exp())
            G = (t.index_select(0, rows) - x + mu + noise).sign_().div_(x.numel())
            weight = self.beta / len(x)
            to_mu = G + weight * mu
            to_v = G.mul_(noise).add_(v.exp().sub_(1), alpha=weight).div_(2)
            return [((to_mu @ U + to_v @ V) * (h > 0)).T @ x, to_mu.T @ h, to_v.T @ h]

        name = f"the module of {task!r} diverged under probsurgery"
        adam.minimise([D, U, V], gradients, count=len(f), generator=generator, name=name)
        before, after = (distance(each, t) for each in (f, f - (f @ D.T).relu_() @ U.T))
        return Alignment(SurgeryHead(head, D, U, _KIND), {"loss_before": before, "loss": after})

    def _adam(self) -> Adam:
        return Adam(self.steps, self.lr, self.batch, self.decay, self.seed)
