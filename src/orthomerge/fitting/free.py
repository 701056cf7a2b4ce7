"""Every weight by itself, from a merge on: theta = theta_0 + D, drawn back to theta_0 by `decay`.

Letters: theta, theta_0, D [P].
"""

from __future__ import annotations

from typing import Any

import torch

from orthomerge.fitting.adam import FlatAdam, pieces


class Free:
    """`origin` [P]: theta_0. `decay`: what share of the rate D loses in a step, as in AdamW."""

    def __init__(self, origin: torch.Tensor, *, lr: float, decay: float = 0.0) -> None:
        self._origin, self._lr, self._decay = origin, lr, decay
        self.values = origin.clone()
        self._adam = FlatAdam(len(origin), origin.device)

    @property
    def size(self) -> int:
        return len(self._origin)

    def write(self, weights: torch.Tensor) -> None:
        weights.copy_(self.values)

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        rate = self._lr * share
        self._adam.begin()
        for place in pieces(len(weights), weights.device):
            if self._decay:
                self.values[place].lerp_(self._origin[place], rate * self._decay)
            self._adam.update(self.values, place, gradient[place], rate)
            weights[place] = self.values[place]

    def measures(self) -> dict[str, float]:
        return {"moved": float((self.values - self._origin).norm() / self._origin.norm().clamp_min(1e-30))}

    def kept(self) -> torch.Tensor:
        return self.values.clone()

    def restore(self, kept: torch.Tensor) -> None:
        self.values.copy_(kept)

    def state(self) -> dict[str, Any]:
        return {"values": self.values, "adam": self._adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self._adam.load(state["adam"])
