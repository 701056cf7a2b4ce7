"""WUDI-Merging: a task vector that differs from each expert's only in directions that its inputs hardly have.

Cheng et al., "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via Task
Vectors", 2025, arXiv 2503.08099.

Per linear weight, minimise over tau, with Adam from tau = sum_t tau_t,

    L(tau) = sum_t ||(tau - tau_t) tau_t^T||_F^2 / ||tau_t||_F^2,    grad L = 2 (tau G - C),
    G = sum_t G_t,    C = sum_t tau_t G_t,    G_t = tau_t^T tau_t / ||tau_t||_F^2;    delta = scale * tau.

Stopping early is part of the method: no element moves much further than `steps` * `lr`.

Letters: T experts; tau, tau_t, C [m, k]; G_t, G [k, k]. A linear weight is a two-dimensional tensor [out, in] whose
name is not that of a table of tokens or positions (`polar.is_table`) nor of the bare [in, out] projections of open_clip
(`visual.proj`, `text_projection`).
Differs from the paper: the authors' code names the four linear weights of a CLIP block and leaves everything else at
the base; here every linear weight is merged, and `rest` is an option. An expert that did not change the weight has no
term in L. GPT-2 stores its weights as [in, out] under the names of linear weights; do not merge it with this method.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from orthomerge.core.adam import Adam
from orthomerge.core.checks import choices, finite, not_negative, positive
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.polar import is_table

_BARE = ("visual.proj", "text_projection")


@dataclass(frozen=True)
class Wudi:
    """`steps`, `lr`: iterations and step size of Adam. `scale`: for all tensors alike.

    `rest`: other tensors stay at the base (authors' code) or get the mean (FusionBench).
    """

    scale: float = 1.0
    steps: int = 300
    lr: float = 1e-5
    rest: Literal["base", "mean"] = "base"

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        finite(scale=self.scale)
        positive(lr=self.lr)
        not_negative(steps=self.steps)
        choices(self)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if base.ndim != 2 or is_table(site.key) or site.key.endswith(_BARE):
            return torch.zeros_like(base) if self.rest == "base" else deltas.mean(0) * self.scale
        live = deltas[deltas.flatten(1).any(1)]
        if len(live) < 2:  # L is zero at the start already
            return live.sum(0) * self.scale
        G = live.new_zeros(base.shape[1], base.shape[1], dtype=torch.float64)
        C = torch.zeros_like(base, dtype=torch.float64)
        for delta in live:
            tau = delta.double()
            unit = tau / tau.norm()
            G_t = unit.T @ unit
            G += G_t
            C += tau @ G_t
        # Twice the G and C of the formula, as the gradient has them.
        tau, G, C = live.sum(0), (2 * G).float(), (2 * C).float()
        adam, gradient = Adam(tau), torch.empty_like(tau)
        for _ in range(self.steps):
            torch.matmul(tau, G, out=gradient)
            adam.step(tau, gradient.sub_(C), self.lr)
        return tau.mul_(self.scale)
