"""One coefficient a task and group of weights: theta = theta_0 + sum_t c_t[group] tau_t.

A group is the whole encoder (task-wise AdaMerging), a tensor (layer-wise AdaMerging), or a row of a matrix (an element
of a vector is a row of its own). The gradient that reaches c_t[group] is the sum of dtheta * tau_t over the group.

Letters: T tasks; a tensor is [rows, k]; c, as `values`, [T, groups].
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from orthomerge.fitting.adam import FlatAdam
from orthomerge.fitting.layout import Layout

Groups = Literal["encoder", "tensor", "row"]


class Coefficients:
    """`origin` [P] and `vectors` [T, P] on one device; `start`: every coefficient at first; `bounds`: clamped to it.

    A coefficient outside the bounds counts as the bound, and no gradient moves it, as in AdaMerging's code.
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
        self._origin, self._vectors, self._lr, self._bounds = origin, vectors, lr, bounds
        self._parts: list[tuple[slice, slice, int]] = []  # place in [P], place among groups, number of rows
        count = 0
        for name, place in layout.places.items():
            shape = layout.shapes[name]
            rows = shape[0] if groups == "row" and shape else 1
            self._parts.append((place, slice(0, 1) if groups == "encoder" else slice(count, count + rows), rows))
            count += rows
        self.groups = 1 if groups == "encoder" else count
        self.values = torch.full((len(vectors), self.groups), start, device=origin.device)
        self._adam = FlatAdam(self.values.numel(), origin.device)

    @property
    def size(self) -> int:
        return self.values.numel()

    def write(self, weights: torch.Tensor) -> None:
        values = self.clamped()
        weights.copy_(self._origin)
        if self.groups == 1:
            weights.add_(values[:, 0] @ self._vectors)
            return
        for place, where, rows in self._parts:
            tau = self._vectors[:, place].view(len(values), rows, -1)
            weights[place] += torch.einsum("tr,trk->rk", values[:, where], tau).reshape(-1)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """That of the coefficients, [T, groups], from that of the weights."""
        if self.groups == 1:
            found = (self._vectors @ gradient)[:, None]
        else:
            found = torch.empty_like(self.values)
            for place, where, rows in self._parts:
                tau = self._vectors[:, place].view(len(found), rows, -1)
                found[:, where] = torch.einsum("rk,trk->tr", gradient[place].view(rows, -1), tau)
        if self._bounds is not None:
            found *= (self.values >= self._bounds[0]) & (self.values <= self._bounds[1])
        return found

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        found = self.gradient(gradient).view(-1)
        self._adam.step(self.values.view(-1), lambda place: found[place], self._lr * share)
        self.write(weights)

    def measures(self) -> dict[str, float]:
        values = self.clamped()
        return {"least": float(values.min()), "mean": float(values.mean()), "most": float(values.max())}

    def kept(self) -> torch.Tensor:
        return self.values.clone()

    def restore(self, kept: torch.Tensor) -> None:
        self.values.copy_(kept)

    def state(self) -> dict[str, Any]:
        return {"values": self.values, "adam": self._adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self._adam.load(state["adam"])

    def clamped(self) -> torch.Tensor:
        """The coefficients as they count, [T, groups]."""
        return self.values if self._bounds is None else self.values.clamp(*self._bounds)
