"""Adam for gradients that the caller computes, and learning rates that rise and fall along a cosine.

Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2017 for the cosine, arXiv 1608.03983.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_BETA_1, _BETA_2 = 0.9, 0.999


class Adam:
    """Moments of one tensor of parameters, and the number of steps that they have seen."""

    def __init__(self, like: torch.Tensor, *, epsilon: float = 1e-8) -> None:
        self._first, self._second, self._epsilon = torch.zeros_like(like), torch.zeros_like(like), epsilon
        self.steps = 0

    def step(self, values: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
        """Move values against their gradient, in place."""
        self.steps += 1
        with torch.no_grad():
            self._first.lerp_(gradient, 1 - _BETA_1)
            self._second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
            root = self._second.sqrt().div_(math.sqrt(1 - _BETA_2**self.steps)).add_(self._epsilon)
            values.addcdiv_(self._first, root, value=-lr / (1 - _BETA_1**self.steps))

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"first": self._first, "second": self._second, "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        self._first.copy_(state["first"])
        self._second.copy_(state["second"])
        self.steps = int(state["steps"])


def rate_share(step: int, steps: int, *, warmup: float = 0.0) -> float:
    """Share of the full learning rate at a step counted from 0: a linear rise, then a cosine down to zero."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))
