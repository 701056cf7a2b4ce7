"""Adam over one flat tensor, piece by piece.

Kingma and Ba 2015, arXiv 1412.6980. Pieces keep what is computed on the way small, and on a CPU in its cache.

Differs from the paper: epsilon is 1e-15. Gradients of a mask are of the order of 1e-8, where the usual one would decide
how far an element moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-15
_PIECE = {"cpu": 1 << 16}
_LARGE_PIECE = 1 << 24


def pieces(size: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover a flat tensor."""
    step = _PIECE.get(device.type, _LARGE_PIECE)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


class FlatAdam:
    """The moments of `size` elements and the number of steps that they have seen."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._first, self._second = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.steps = 0

    def update(self, values: torch.Tensor, place: slice, gradient: torch.Tensor, lr: float) -> None:
        """Move `values[place]` against a gradient, as a part of the step that `begin` began."""
        first = self._first[place].lerp_(gradient, 1 - _BETA_1)
        second = self._second[place].mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
        size = lr / (1 - _BETA_1**self.steps)
        root = second.sqrt().div_(math.sqrt(1 - _BETA_2**self.steps)).add_(_EPSILON)
        values[place].addcdiv_(first, root, value=-size)

    def begin(self) -> None:
        """One step more."""
        self.steps += 1

    def step(self, values: torch.Tensor, gradient: Callable[[slice], torch.Tensor], lr: float) -> None:
        """A whole step over `values`."""
        self.begin()
        for place in pieces(len(values), values.device):
            self.update(values, place, gradient(place), lr)

    def state(self) -> dict[str, torch.Tensor | int]:
        """What a resumed run needs."""
        return {"first": self._first, "second": self._second, "steps": self.steps}

    def load(self, state: dict[str, torch.Tensor | int]) -> None:
        self._first.copy_(torch.as_tensor(state["first"]))
        self._second.copy_(torch.as_tensor(state["second"]))
        self.steps = int(state["steps"])
