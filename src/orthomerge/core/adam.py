"""Adam for gradients that the caller computes, torch's AdamW, and learning rates with warm-up and cosine decay.

Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter, AdamW 2019, arXiv 1711.05101, cosine 2017, 1608.03983.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Adam for one tensor of parameters: its moments and the number of steps."""

    def __init__(self, like: torch.Tensor) -> None:
        self._first, self._second = torch.zeros_like(like), torch.zeros_like(like)
        self.steps = 0

    def step(self, values: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
        self.steps += 1
        with torch.no_grad():
            self._first.lerp_(gradient, 1 - _BETA_1)
            self._second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
            root = self._second.sqrt().div_(math.sqrt(1 - _BETA_2**self.steps)).add_(_EPSILON)
            values.addcdiv_(self._first, root, value=-lr / (1 - _BETA_1**self.steps))


class Optimiser:
    """torch's AdamW over groups with `params`, `lr` and optionally `weight_decay` and `eps`; fused on a GPU."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        self._adamw = torch.optim.AdamW(
            [{**group, "rate": group["lr"]} for group in groups], weight_decay=0.0, fused=device.type == "cuda"
        )
        self.values: list[torch.Tensor] = [value for group in groups for value in group["params"]]

    def step(self, share: float = 1.0) -> None:
        """Take a step at a share of the full learning rates and clear the gradients; skip values without one."""
        for group in self._adamw.param_groups:
            group["lr"] = group["rate"] * share
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return values and moments, from which an interrupted run continues."""
        return {"values": [value.detach() for value in self.values], "moments": self._adamw.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.restore(state["values"])
        self._adamw.load_state_dict(state["moments"])

    @torch.no_grad()
    def restore(self, values: Sequence[torch.Tensor]) -> None:
        for own, value in zip(self.values, values, strict=True):
            own.copy_(value)


def rate_share(step: int, steps: int, *, warmup: float = 0.0) -> float:
    """Return the share of the full learning rate at a step from 0: linear warm-up, then cosine decay to zero."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))
