"""Weights that stay as they are: for a fit of the objective's own parameters alone."""

from __future__ import annotations

from typing import Any

import torch


class Fixed:
    """`weights` [P]."""

    size = 0

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def write(self, weights: torch.Tensor) -> None:
        weights.copy_(self._weights)

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        """Nothing moves."""

    def measures(self) -> dict[str, float]:
        return {}

    def kept(self) -> torch.Tensor:
        return self._weights

    def restore(self, kept: torch.Tensor) -> None:
        """Nothing has moved."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """There is nothing to load."""
