"""Gates that are coefficients of the experts' task vectors, from an origin theta_0 on.

Letters: T tasks; tau_t [P] their vectors; `values` [T, number of coefficients per task].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.fitting.gates import Gates
from orthomerge.fitting.layout import Layout
from orthomerge.merging.polar import is_table

Groups = Literal["encoder", "tensor", "row"]


class Coefficients(Gates):
    """One coefficient per task and group of weights: theta = theta_0 + sum_t c_t[group] tau_t.

    A group is the whole encoder (task-wise AdaMerging), a tensor (layer-wise AdaMerging), or a row of a matrix (an
    element of a vector is a row of its own). The gradient that reaches c_t[group] is the sum of dtheta * tau_t over the
    group. `start`: every coefficient at first. A coefficient outside `bounds` counts as the bound, and no gradient
    moves it, as in AdaMerging's code.
    """

    def __init__(
        self,
        origin: torch.Tensor,
        vectors: torch.Tensor,
        layout: Layout,
        *,
        groups: Groups,
        start: float = 0.0,
        lr: float = 1e-3,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        self._parts: list[tuple[slice, slice, int]] = []  # place in [P], place among groups, number of rows
        count = 0
        for name, place in layout.places.items():
            shape = layout.shapes[name]
            rows = shape[0] if groups == "row" and shape else 1
            self._parts.append((place, slice(count, count + rows), rows))
            count += rows
        self._whole = groups == "encoder"
        super().__init__(torch.full((len(vectors), 1 if self._whole else count), start, device=origin.device), lr=lr)
        self._origin, self._vectors, self._bounds = origin, vectors, bounds

    def clamped(self) -> torch.Tensor:
        """The coefficients as they count, [T, groups]."""
        return self.values if self._bounds is None else self.values.clamp(*self._bounds)

    def write(self, weights: torch.Tensor) -> None:
        values = self.clamped()
        weights.copy_(self._origin)
        if self._whole:
            weights.add_(values[:, 0] @ self._vectors)
            return
        for place, groups, rows in self._parts:
            tau = self._vectors[:, place].view(len(values), rows, -1)
            weights[place] += torch.einsum("tr,trk->rk", values[:, groups], tau).reshape(-1)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._whole:
            reached = (self._vectors @ gradient)[:, None]
        else:
            reached = torch.empty_like(self.values)
            for place, groups, rows in self._parts:
                tau = self._vectors[:, place].view(len(reached), rows, -1)
                reached[:, groups] = torch.einsum("rk,trk->tr", gradient[place].view(rows, -1), tau)
        if self._bounds is not None:
            reached *= (self.values >= self._bounds[0]) & (self.values <= self._bounds[1])
        return reached

    def measures(self) -> dict[str, float]:
        values = self.clamped()
        return {"least": float(values.min()), "mean": float(values.mean()), "most": float(values.max())}


@dataclass(frozen=True)
class _Part:
    """Where a tensor and its gates lie; `factors`: scaled U [T, m, r] and Vh [T, r, k] of a matrix."""

    place: slice
    gates: slice
    factors: tuple[torch.Tensor, torch.Tensor] | None


class Components(Gates):
    """One coefficient per task and singular component of a matrix: theta = theta_0 + sum_t U_t diag(g_t * s_t) V_t^T.

    tau_t = U_t diag(s_t) V_t^T is a task vector's matrix; a gate of 1 adds the whole component, 0 none of it, and all
    are zero at first. Tensors that are no matrices, and tables of which rows are looked up, have one gate per task. The
    gradient that reaches g_t is s_t * diag(U_t^T dtheta V_t).

    Gating singular components is the idea of AdaRank (Lee et al. 2025, arXiv 2503.22178); there the gates are binary
    and fitted by entropy.

    Letters: a matrix [m, k] with r <= min(m, k) components; U [T, m, r], s [T, r], Vh [T, r, k].
    """

    def __init__(self, origin: torch.Tensor, vectors: torch.Tensor, layout: Layout, *, lr: float) -> None:
        self._parts: list[_Part] = []
        count = 0
        for name, place in layout.places.items():
            shape = layout.shapes[name]
            factors = None
            if len(shape) == 2 and min(shape) > 1 and not is_table(name):
                U, s, Vh = torch.linalg.svd(vectors[:, place].reshape(-1, *shape), full_matrices=False)
                factors = (U * s[:, None]).contiguous(), Vh.contiguous()
            rank = min(shape) if factors is not None else 1
            self._parts.append(_Part(place, slice(count, count + rank), factors))
            count += rank
        super().__init__(torch.zeros(len(vectors), count, device=origin.device), lr=lr)
        self._origin, self._vectors = origin, vectors

    def write(self, weights: torch.Tensor) -> None:
        weights.copy_(self._origin)
        for part in self._parts:
            gates = self.values[:, part.gates]
            if part.factors is None:
                weights[part.place] += gates[:, 0] @ self._vectors[:, part.place]
            else:
                U, Vh = part.factors
                weights[part.place] += torch.bmm(U * gates[:, None], Vh).sum(0).reshape(-1)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        reached = torch.empty_like(self.values)
        for part in self._parts:
            own = gradient[part.place]
            if part.factors is None:
                reached[:, part.gates] = (self._vectors[:, part.place] @ own)[:, None]
            else:
                U, Vh = part.factors
                reached[:, part.gates] = ((U.mT @ own.view(U.shape[1], -1)) * Vh).sum(2)
        return reached

    def measures(self) -> dict[str, float]:
        return {"least": float(self.values.min()), "most": float(self.values.max())}
