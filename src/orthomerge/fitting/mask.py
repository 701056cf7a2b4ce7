"""A mask over a merged task vector, one number a weight: theta = theta_b + cap sigma(S) delta.

delta is the vector of a merge, its scale included. cap = 1 is the paper's mask, which can only shrink it; a larger cap
lets an element grow up to that multiple. The gradient that reaches S is dtheta * cap * delta * s (1 - s), s = sigma(S),
plus that of `decay` * sum s^2.

A hard mask is cap at S > 0 and nothing elsewhere; its gradient is taken as if it were soft (straight through).

Letters: S, delta, theta [P].
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from orthomerge.fitting.adam import FlatAdam, pieces

Form = Literal["soft", "hard"]


class Mask:
    """`start`: the value of sigma(S) at first, everywhere."""

    def __init__(
        self,
        base: torch.Tensor,
        delta: torch.Tensor,
        *,
        cap: float = 1.0,
        start: float = 0.5,
        lr: float = 0.1,
        decay: float = 0.0,
        form: Form = "soft",
    ) -> None:
        self._base, self._delta, self._cap = base, delta, cap
        self._lr, self._decay, self._form = lr, decay, form
        self.logits = torch.full_like(delta, math.log(start / (1 - start)))
        self._adam = FlatAdam(len(delta), delta.device)
        self.size, self._live = len(delta), int(delta.count_nonzero())

    def write(self, weights: torch.Tensor) -> None:
        self.write_as(weights, self._form)

    def write_as(self, weights: torch.Tensor, form: Form) -> None:
        """Fill in the weights of the mask as it is, or of the hard mask that it rounds to."""
        for place in pieces(len(weights), weights.device):
            self._write(weights, place, form)

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        self._adam.begin()
        for place in pieces(len(weights), weights.device):
            soft = torch.sigmoid(self.logits[place])
            found = gradient[place] * self._delta[place]
            if self._cap != 1:
                found.mul_(self._cap)
            if self._decay:
                found.add_(soft, alpha=2 * self._decay)
            found.mul_(soft).mul_(1 - soft)
            self._adam.update(self.logits, place, found, self._lr * share)
            self._write(weights, place, self._form)

    def measures(self) -> dict[str, float]:
        """`masked`: the share of the elements that some expert changed which the mask makes less than half of."""
        off = ((self.logits < 0) & (self._delta != 0)).sum()
        return {"masked": float(int(off)) / max(self._live, 1)}

    def kept(self) -> torch.Tensor:
        return self.logits.clone()

    def restore(self, kept: torch.Tensor) -> None:
        self.logits.copy_(kept)

    def state(self) -> dict[str, Any]:
        return {"logits": self.logits, "adam": self._adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.logits.copy_(state["logits"])
        self._adam.load(state["adam"])

    def _write(self, weights: torch.Tensor, place: slice, form: Form) -> None:
        logits = self.logits[place]
        mask = (logits > 0).float() if form == "hard" else torch.sigmoid(logits)
        torch.addcmul(self._base[place], mask, self._delta[place], value=self._cap, out=weights[place])
