"""Gates: trained values that determine an encoder's weights, such as masks and coefficients.

Autograd computes the gradient of the weights; gates turn it into that of their own values, and write new weights.

Letters: P elements of the encoder; theta_0 [P] the weights to start from; T tasks; tau_t [P] their task vectors.
"""

import math
from typing import Any, Literal

import torch

from orthomerge.fitting.layout import Layout

Form = Literal["soft", "hard"]

# Gradients of a mask are of the order of 1e-8, the usual epsilon of Adam.
_EPSILON = 1e-15


class Gates:
    """Trained `values` that determine the weights; `groups`: AdamW's. Subclasses define `write` and `gradient`."""

    def __init__(self, values: torch.Tensor, *, lr: float, decay: float = 0.0) -> None:
        self.values = values
        self.groups: list[dict[str, Any]] = [{"params": [values], "lr": lr, "weight_decay": decay, "eps": _EPSILON}]

    @property
    def size(self) -> int:
        return self.values.numel()

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        """Write the weights of the current values into `weights` [P], after `step` steps."""
        raise NotImplementedError

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the values from that of the weights [P], which may be overwritten."""
        raise NotImplementedError

    def backward(self, gradient: torch.Tensor, step: int) -> None:
        """Set the gradient of the values for step `step`, counted from 0, from that of the weights [P]."""
        self.values.grad = self.gradient(gradient)

    def measures(self) -> dict[str, float]:
        """Figures for the training curve."""
        return {}


class Fixed(Gates):
    """Constant weights [P], when only the objective's parameters are trained."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights.new_zeros(0), lr=0.0)
        self._weights, self.groups = weights, []

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        weights.copy_(self._weights)

    def backward(self, gradient: torch.Tensor, step: int) -> None:
        pass


class Free(Gates):
    """All weights are trained: theta = theta_0 + D. `decay`: weight decay of D."""

    def __init__(self, origin: torch.Tensor, *, lr: float, decay: float = 0.0) -> None:
        super().__init__(torch.zeros_like(origin), lr=lr, decay=decay)
        self._origin = origin

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        torch.add(self._origin, self.values, out=weights)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def measures(self) -> dict[str, float]:
        return {"moved": float(self.values.norm() / self._origin.norm().clamp_min(1e-30))}


class Mask(Gates):
    """A mask over a merged task vector, one number per weight: theta = theta_b + cap sigma(S) delta.

    delta is the vector of a merge, its scale included. cap = 1 is MOMA's mask, which can only shrink it. The gradient
    of S is dtheta * cap * delta * s (1 - s), s = sigma(S), plus that of `penalty` * sum s^2. A hard mask is cap at
    S > 0 and 0 elsewhere; its gradient is that of the soft mask (straight through). `start`: initial sigma(S).

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
        penalty: float = 0.0,
        form: Form = "soft",
    ) -> None:
        super().__init__(torch.full_like(delta, math.log(start / (1 - start))), lr=lr)
        self._base, self._delta, self._cap, self._penalty, self._form = base, delta, cap, penalty, form

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        self.write_as(weights, self._form)

    def write_as(self, weights: torch.Tensor, form: Form) -> None:
        mask = (self.values > 0).float() if form == "hard" else torch.sigmoid(self.values)
        torch.addcmul(self._base, mask, self._delta, value=self._cap, out=weights)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        soft = torch.sigmoid(self.values)
        gradient.mul_(self._delta).mul_(self._cap)
        if self._penalty:
            gradient.add_(soft, alpha=2 * self._penalty)
        gradient.mul_(soft)
        return gradient.mul_(soft.neg_().add_(1))

    def measures(self) -> dict[str, float]:
        return {"masked": masked_share(self.values, self._delta)}

    def masked_by_tensor(self, layout: Layout) -> dict[str, dict[str, int]]:
        """Count nonzero elements of the vector, and those whose mask is less than half of `cap`, by tensor."""
        nonzero = self._delta != 0
        masked = nonzero & (self.values < 0)
        return {
            name: {"masked": int(masked[place].sum()), "of": int(nonzero[place].sum())}
            for name, place in layout.places.items()
        }


def masked_share(logits: torch.Tensor, vector: torch.Tensor) -> float:
    """Share of the nonzero elements of `vector` whose mask is more likely off than on."""
    nonzero = vector != 0
    return float(((logits < 0) & nonzero).sum()) / max(int(nonzero.sum()), 1)


class Coefficients(Gates):
    """One coefficient per task or, with `by_tensor`, per task and tensor: theta = theta_0 + sum_t c_t tau_t.

    The gradient of c_t is the sum of dtheta * tau_t over the encoder or tensor. A coefficient outside 0 to 1 counts
    with `clamp` as the nearer bound and has gradient 0, as in AdaMerging's code.
    """

    def __init__(
        self,
        origin: torch.Tensor,
        vectors: torch.Tensor,
        layout: Layout,
        *,
        by_tensor: bool,
        start: float = 0.3,
        lr: float = 1e-3,
        clamp: bool = True,
    ) -> None:
        self._places = list(layout.places.values()) if by_tensor else [slice(layout.size)]
        super().__init__(torch.full((len(vectors), len(self._places)), start, device=origin.device), lr=lr)
        self._origin, self._vectors = origin, vectors
        self._bounds = (0.0, 1.0) if clamp else (-math.inf, math.inf)

    def clamped(self) -> torch.Tensor:
        return self.values.clamp(*self._bounds)

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        weights.copy_(self._origin)
        for place, values in zip(self._places, self.clamped().T, strict=True):
            weights[place] += torch.einsum("t,tk->k", values, self._vectors[:, place])

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        slopes = [torch.einsum("k,tk->t", gradient[place], self._vectors[:, place]) for place in self._places]
        low, high = self._bounds
        return torch.stack(slopes, 1) * ((self.values >= low) & (self.values <= high))

    def measures(self) -> dict[str, float]:
        values = self.clamped()
        return {"least": float(values.min()), "mean": float(values.mean()), "most": float(values.max())}
