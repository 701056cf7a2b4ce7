"""Linear classifier trained with labels on the merged features: a ceiling for every linear head.

Multinomial logistic regression, minimised by L-BFGS in float64,

    1/n sum_i -log softmax(V z_i + c)[y_i] + l2/2 ||V||_F^2,    z = (f - mu) / sigma,

and folded back into a head on the original features: W = V / sigma, b = c - W mu.

Letters: f [n, d] merged features with mean mu and standard deviation sigma [d] over the support, V, W [C, d], b, c [C].
A class without support gets bias -infinity: it is never predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy

from orthomerge.core.checks import at_least_one, positive
from orthomerge.evaluation.protocols import Evidence, Need
from orthomerge.models.features import Features
from orthomerge.models.heads import Head, Linear

_FLAT = 1e-12  # share of a feature's magnitude below which its deviation is taken for rounding


@dataclass(frozen=True)
class Probe:
    """`l2`: weight of the penalty on standardised features, not on the bias; `steps`: maximum of L-BFGS iterations."""

    l2: float = 1e-3
    steps: int = 200

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "labels"})

    def __post_init__(self) -> None:
        # Without a penalty separable classes have no optimum: the weights grow without bound.
        positive(l2=self.l2)
        at_least_one(steps=self.steps)

    def build(self, evidence: Evidence) -> Head:
        support, labels = evidence.labelled("probe")
        f = support.values.double()
        mu, sigma = f.mean(0), f.std(0, correction=0)
        sigma = torch.where(sigma > _FLAT * f.abs().amax(0), sigma, 1)
        supported = labels.to(f.device).bincount(minlength=len(evidence.head.labels)) > 0
        present, targets = supported.nonzero().flatten(), (supported.cumsum(0) - 1)[labels]
        V, c = self._fit((f - mu) / sigma, targets, len(present))
        W = f.new_zeros(len(evidence.head.labels), f.shape[1])
        b = f.new_full((len(W),), -torch.inf)
        W[present] = V / sigma
        b[present] = c - (V / sigma) @ mu
        return Head(Linear(W.float(), b.float()), evidence.head.labels)

    def _fit(self, z: torch.Tensor, targets: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return V [classes, d] and c [classes] at the minimum."""
        theta = z.new_zeros(classes, z.shape[1] + 1).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [theta],
            max_iter=self.steps,
            max_eval=2 * self.steps,
            tolerance_grad=1e-7,
            tolerance_change=1e-12,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def loss_and_gradient() -> torch.Tensor:
            V, c = theta[:, :-1], theta[:, -1]
            loss = cross_entropy(torch.addmm(c, z, V.T), targets) + self.l2 / 2 * V.square().sum()
            (theta.grad,) = torch.autograd.grad(loss, theta)
            return loss.detach()

        step: Callable[..., object] = optimizer.step  # untyped in torch
        step(loss_and_gradient)
        return theta[:, :-1].detach(), theta[:, -1].detach()


def fit_probe(features: Features, labels: tuple[str, ...]) -> Head:
    blank = Head(Linear(features.values.new_zeros(len(labels), features.values.shape[1])), labels)
    return Probe().build(Evidence(blank, features))
