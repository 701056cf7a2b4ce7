"""How an encoder's weights depend on what is trained; each kind knows its weights and the gradient that reaches it.

The encoder computes with ordinary weights [P] and autograd gives their gradient [P], once per step and whatever the
number of tasks; gates turn that into a step of their own parameters and write the new weights. No graph is ever built
over the gates.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from orthomerge.core.adam import Adam

# Gradients of a mask are of the order of 1e-8, where the usual epsilon would decide how far an element moves.
_EPSILON = 1e-15

Form = Literal["soft", "hard"]


class Gates:
    """`values`: what is trained, by Adam at rate `lr`. A kind has `write` and `gradient`."""

    def __init__(self, values: torch.Tensor, *, lr: float) -> None:
        self.values, self._lr = values, lr
        self._adam = Adam(values, epsilon=_EPSILON)

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return self.values.numel()

    def write(self, weights: torch.Tensor) -> None:
        """Fill in the weights [P] that the present values stand for."""
        raise NotImplementedError

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the values, from that of the weights [P], which may be overwritten: P numbers take memory."""
        raise NotImplementedError

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        """One step against the gradient [P] of the weights, at a share of the full rate; then `write`."""
        self._adam.step(self.values, self.gradient(gradient), self._lr * share)
        self.write(weights)

    def measures(self) -> dict[str, float]:
        """What to report at a look."""
        return {}

    def kept(self) -> torch.Tensor:
        """A copy of what is trained, for `restore`."""
        return self.values.clone()

    def restore(self, kept: torch.Tensor) -> None:
        self.values.copy_(kept)

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"values": self.values, "adam": self._adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self._adam.load(state["adam"])
        self.restore(state["values"])


class Fixed(Gates):
    """Weights [P] that stay as they are: for a fit of the objective's own parameters alone."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights.new_zeros(0), lr=0.0)
        self._weights = weights

    def write(self, weights: torch.Tensor) -> None:
        weights.copy_(self._weights)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.values


class Free(Gates):
    """Every weight by itself, from a merge theta_0 [P] on: theta = theta_0 + D.

    `decay`: the share of the rate that D loses in a step, as in AdamW.
    """

    def __init__(self, origin: torch.Tensor, *, lr: float, decay: float = 0.0) -> None:
        super().__init__(origin.clone(), lr=lr)
        self._origin, self._decay = origin, decay

    def write(self, weights: torch.Tensor) -> None:
        weights.copy_(self.values)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        if self._decay:
            self.values.lerp_(self._origin, self._lr * share * self._decay)
        super().step(gradient, weights, share)

    def measures(self) -> dict[str, float]:
        return {"moved": float((self.values - self._origin).norm() / self._origin.norm().clamp_min(1e-30))}


class Mask(Gates):
    """A mask over a merged task vector, one number per weight: theta = theta_b + cap sigma(S) delta.

    delta is the vector of a merge, its scale included. cap = 1 is MOMA's mask, which can only shrink it; a larger cap
    lets an element grow up to that multiple. The gradient that reaches S is dtheta * cap * delta * s (1 - s), s =
    sigma(S), plus that of `decay` * sum s^2. A hard mask is cap at S > 0 and nothing elsewhere; its gradient is taken
    as if it were soft (straight through). `start`: sigma(S) at first, everywhere.

    Letters: S (`values`), delta, theta [P].
    """

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
        super().__init__(torch.full_like(delta, math.log(start / (1 - start))), lr=lr)
        self._base, self._delta, self._cap, self._decay, self._form = base, delta, cap, decay, form

    def write(self, weights: torch.Tensor) -> None:
        self.write_as(weights, self._form)

    def write_as(self, weights: torch.Tensor, form: Form) -> None:
        """Fill in the weights of the mask as it is, or of the hard mask that it rounds to."""
        mask = (self.values > 0).float() if form == "hard" else torch.sigmoid(self.values)
        torch.addcmul(self._base, mask, self._delta, value=self._cap, out=weights)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        soft = torch.sigmoid(self.values)
        gradient.mul_(self._delta).mul_(self._cap)
        if self._decay:
            gradient.add_(soft, alpha=2 * self._decay)
        gradient.mul_(soft)
        return gradient.mul_(soft.neg_().add_(1))

    def measures(self) -> dict[str, float]:
        """`masked`: the share of the elements that some expert changed which the mask makes less than half of."""
        changed = self._delta != 0
        return {"masked": float(((self.values < 0) & changed).sum()) / max(int(changed.sum()), 1)}
