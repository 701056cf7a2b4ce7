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

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.descent import Adam
from orthomerge.alignment.surgery import Module
from orthomerge.core.checks import at_least_one, not_negative
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head

_KIND = "probsurgery"
_AHEAD = 50  # steps for which noise is drawn at once


@dataclass(frozen=True)
class ProbSurgery:
    """`width`: w; `beta`: weight of the KL term; `seed`: of D, the batches and the noise.

    `steps`, `lr`, `batch`: Adam's; `decay`: the learning rate falls to zero along a cosine; `device`: where it is
    trained, which noise depends on.
    """

    width: int = 128
    beta: float = 1e-4
    steps: int = 5000
    lr: float = 1e-3
    batch: int = 16
    decay: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        at_least_one(width=self.width)
        not_negative(beta=self.beta)
        self._adam()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean absolute distance to the expert's features before and, without noise, after."""
        module = Module.of(pair, head, self.seed, rank=self.width, layers=3, device=self.device)
        f, t, (D, U, V) = module.f, module.t, module.layers
        drawn = _noise(module.generator, min(self.batch, len(f)), head.width, f.device)

        def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
            x = f[rows]
            h = (x @ D.T).relu_()
            mu, v = h @ U, h @ V
            noise = next(drawn)[: len(rows)] * (v / 2).exp()
            G = (t[rows] - x + mu + noise).sign_().div_(x.numel())
            weight = self.beta / len(rows)
            to_mu = G + weight * mu
            to_v = G.mul_(noise).add_(v.exp().sub_(1), alpha=weight).div_(2)
            to_h = (to_mu @ U.T + to_v @ V.T) * (h > 0)
            return [torch.stack([to_h.T @ x, h.T @ to_mu, h.T @ to_v])]

        module.train(self._adam(), gradients, name=f"the module of {module.task!r} diverged under probsurgery")
        return module.alignment(head, _KIND)

    def _adam(self) -> Adam:
        return Adam(self.steps, self.lr, self.batch, self.decay, self.seed)


def _noise(fit: torch.Generator, batch: int, width: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Normal numbers [batch, width] without end, by a seed that the fit draws; made for many steps at once."""
    generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=fit)))
    while True:
        yield from torch.randn(_AHEAD, batch, width, generator=generator, device=device)
