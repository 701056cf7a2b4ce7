"""WUDI-Merging: the task vector that differs from each expert's only where that expert's inputs hardly reach.

Cheng et al., "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via Task
Vectors", 2025, arXiv 2503.08099.

The rows of a task vector lie in the span of the inputs that it was trained on, so they stand in for the data.
Per linear weight, minimise over tau, with Adam from tau = sum_t tau_t,

    L(tau) = sum_t ||(tau - tau_t) tau_t^T||_F^2 / ||tau_t||_F^2,    grad L = 2 (tau G - C),
    G = sum_t G_t,    C = sum_t tau_t G_t,    G_t = tau_t^T tau_t / ||tau_t||_F^2;    delta = scale * tau.

Stopping early is part of the method: no element moves much further than `steps` * `lr`.

Letters: T experts; tau, tau_t, C [m, k]; G_t, G [k, k]; F [q, k] with G = F^T F.
A linear weight is a two-dimensional tensor [out, in] as torch.nn.Linear stores it. By its name, a table of
tokens or positions is none (contains `embed`, `position`, `shared.weight`, `relative_attention_bias`,
`wte.weight`, `wpe.weight`), nor are the bare [in, out] projections of open_clip (`visual.proj`,
`text_projection`).
Differs from the paper: the authors' code names the four linear weights of a CLIP block and leaves everything
else at the base; here every linear weight is merged, and `rest` says what becomes of the others. The gradient
is the closed form above. An expert that did not change the weight has no term in L. GPT-2 stores its
weights as [in, out] under the names of linear weights; do not merge it with this method.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from orthomerge.core.adam import Adam
from orthomerge.core.errors import RecipeError
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.options import choices, finite
from orthomerge.merging.polar import is_table, svd

_NEGLIGIBLE = 1e-5  # share of ||tau_t|| below which a singular value adds 1e-10 to G: float32 cannot hold it
_BARE = ("visual.proj", "text_projection")


@dataclass(frozen=True)
class Wudi:
    """`steps`, `lr`: iterations and step size of Adam. `scale`: for all tensors alike.

    `rest`: tensors that are no linear weights stay at the base (authors' code) or get the mean (FusionBench).
    """

    scale: float = 1.0
    steps: int = 300
    lr: float = 1e-5
    rest: Literal["base", "mean"] = "base"

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        finite("scale", self.scale)
        finite("lr", self.lr)
        if self.lr <= 0:
            raise RecipeError(f"'lr' must be positive, got {self.lr}")
        if self.steps < 0:
            raise RecipeError(f"'steps' must be at least 0, got {self.steps}")
        choices(self)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        if base.ndim != 2 or is_table(site.key) or site.key.endswith(_BARE):
            return torch.zeros_like(base) if self.rest == "base" else deltas.mean(0) * self.scale
        live = deltas[deltas.flatten(1).any(1)]
        if len(live) < 2:  # L is zero at the start already
            return live.sum(0) * self.scale
        return self._descend(live, key=site.key).mul_(self.scale)

    def _descend(self, deltas: torch.Tensor, *, key: str) -> torch.Tensor:
        """The vector tau after `steps` iterations of Adam."""
        tau = deltas.sum(0)
        *first_products, last = _curvature(deltas, key=key)
        C = _target(deltas)
        adam, gradient = Adam(tau), torch.empty_like(tau)
        for _ in range(self.steps):
            product = tau
            for matrix in first_products:
                product = product @ matrix
            torch.matmul(product, last, out=gradient)
            adam.step(tau, gradient.sub_(C), self.lr)
        return tau


def _curvature(deltas: torch.Tensor, *, key: str) -> tuple[torch.Tensor, ...]:
    """The matrices whose product is 2 G: G itself, or F^T and F where those are cheaper to multiply by.

    They are when 2 q < k: for wide matrices of few experts, and for experts of low rank, such as LoRA's.
    """
    k = deltas.shape[2]
    rows: list[torch.Tensor] = []
    for tau in deltas:
        norm = float(tau.double().norm())
        _, s, Vh = svd(tau, key=key, floor=_NEGLIGIBLE * norm)
        rows.append((s / norm)[:, None] * Vh)
        if 2 * sum(map(len, rows)) >= k:
            break
    else:
        F = torch.cat(rows)
        return (2 * F.T).float(), F.float()
    G = deltas.new_zeros(k, k, dtype=torch.float64)
    for delta in deltas:
        tau = delta.double()
        unit = tau / tau.norm()
        G.addmm_(unit.T, unit, alpha=2)
    return (G.float(),)


def _target(deltas: torch.Tensor) -> torch.Tensor:
    """2 C, multiplied from the side that is cheaper."""
    C = torch.zeros_like(deltas[0], dtype=torch.float64)
    for delta in deltas:
        tau = delta.double()
        unit = tau / tau.norm()
        m, k = tau.shape
        C += 2 * (unit @ unit.T @ tau if m < k else tau @ (unit.T @ unit))
    return C.float()
