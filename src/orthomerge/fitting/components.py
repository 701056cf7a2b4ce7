"""One coefficient a task and singular component of a matrix: theta = theta_0 + sum_t U_t diag(g_t * s_t) V_t^T.

tau_t = U_t diag(s_t) V_t^T is a task vector's matrix; a gate of 1 adds the whole component, 0 none of it. Tensors that
are no matrices, and tables of which rows are looked up, have one gate a task. The gradient that reaches g_t is
s_t * diag(U_t^T dtheta V_t).

Gating singular components is the idea of AdaRank (Lee et al. 2025, arXiv 2503.22178); there the gates are binary and
fitted by entropy.

Letters: T tasks; a matrix [m, k] with r <= min(m, k) components; U [T, m, r], s [T, r], Vh [T, r, k].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from orthomerge.fitting.adam import FlatAdam
from orthomerge.fitting.layout import Layout
from orthomerge.merging.polar import is_table


@dataclass(frozen=True)
class _Part:
    """Where a tensor and its gates lie; `factors`: scaled U [T, m, r] and Vh [T, r, k] of a matrix."""

    place: slice
    gates: slice
    factors: tuple[torch.Tensor, torch.Tensor] | None


class Components:
    """`origin` [P] and `vectors` [T, P] on one device; all gates are zero at first."""

    def __init__(self, origin: torch.Tensor, vectors: torch.Tensor, layout: Layout, *, lr: float) -> None:
        self._origin, self._vectors, self._lr = origin, vectors, lr
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
        self.values = torch.zeros(len(vectors), count, device=origin.device)
        self._adam = FlatAdam(self.values.numel(), origin.device)

    @property
    def size(self) -> int:
        return self.values.numel()

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
        """That of the gates, [T, all gates], from that of the weights."""
        found = torch.empty_like(self.values)
        for part in self._parts:
            mine = gradient[part.place]
            if part.factors is None:
                found[:, part.gates] = (self._vectors[:, part.place] @ mine)[:, None]
            else:
                U, Vh = part.factors
                found[:, part.gates] = ((U.mT @ mine.view(U.shape[1], -1)) * Vh).sum(2)
        return found

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        found = self.gradient(gradient).view(-1)
        self._adam.step(self.values.view(-1), lambda place: found[place], self._lr * share)
        self.write(weights)

    def measures(self) -> dict[str, float]:
        return {"least": float(self.values.min()), "most": float(self.values.max())}

    def kept(self) -> torch.Tensor:
        return self.values.clone()

    def restore(self, kept: torch.Tensor) -> None:
        self.values.copy_(kept)

    def state(self) -> dict[str, Any]:
        return {"values": self.values, "adam": self._adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self._adam.load(state["adam"])
