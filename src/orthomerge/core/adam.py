"""Adam for gradients that the caller computes, AdamW of torch, and learning rates that rise and fall along a cosine.

Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019 for AdamW, arXiv 1711.05101, and 2017 for the cosine,
arXiv 1608.03983.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Moments of one tensor of parameters, and the number of steps that they have seen."""

    def __init__(self, like: torch.Tensor) -> None:
        self._first, self._second = torch.zeros_like(like), torch.zeros_like(like)
        self.steps = 0

    def step(self, values: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
        """Move values against their gradient, in place."""
        self.steps += 1
        with torch.no_grad():
            self._first.lerp_(gradient, 1 - _BETA_1)
            self._second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
            root = self._second.sqrt().div_(math.sqrt(1 - _BETA_2**self.steps)).add_(_EPSILON)
            values.addcdiv_(self._first, root, value=-lr / (1 - _BETA_1**self.steps))


def adamw(groups: Sequence[Mapping[str, Any]], device: torch.device) -> torch.optim.AdamW:
    """AdamW over groups with `params`, `lr` and where wanted `weight_decay` and `eps`; fused on a GPU."""
    rated = [{**group, "rate": group["lr"]} for group in groups]
    return torch.optim.AdamW(rated, weight_decay=0.0, fused=device.type == "cuda")


def set_rates(optimiser: torch.optim.AdamW, share: float) -> None:
    """Set the learning rate of every group to a share of its full rate."""
    for group in optimiser.param_groups:
        group["lr"] = group["rate"] * share


def rate_share(step: int, steps: int, *, warmup: float = 0.0) -> float:
    """Share of the full learning rate at a step counted from 0: a linear rise, then a cosine down to zero."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))
