"""Gates: trained values that determine an encoder's weights, such as masks and coefficients.

Autograd computes the gradient of the weights once per step. Gates turn it into the gradient of their own values, and
write new weights after each step of the optimiser.

Letters: P elements of the encoder; theta_0 [P] the weights to start from; T tasks; tau_t [P] their task vectors.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from orthomerge.fitting.layout import Layout
from orthomerge.merging.polar import is_table

Form = Literal["soft", "hard"]
Groups = Literal["encoder", "tensor", "row"]

# Gradients of a mask are of the order of 1e-8, the usual epsilon of Adam.
_EPSILON = 1e-15


class Gates:
    """Trained `values` that determine the weights; subclasses define `write` and `gradient`."""

    def __init__(self, values: torch.Tensor, *, lr: float, decay: float = 0.0) -> None:
        self.values, self._lr, self._decay = values, lr, decay

    @property
    def size(self) -> int:
        """Number of trained values."""
        return self.values.numel()

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of AdamW."""
        return [{"params": [self.values], "lr": self._lr, "weight_decay": self._decay, "eps": _EPSILON}]

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
        self._weights = weights

    def groups(self) -> list[dict[str, Any]]:
        return []

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
    """One coefficient per task and group of weights: theta = theta_0 + sum_t c_t[group] tau_t.

    A group is the whole encoder (task-wise AdaMerging), a tensor (layer-wise AdaMerging), or a row of a matrix or
    element of a vector. The gradient of c_t[group] is the sum of dtheta * tau_t over the group. A
    coefficient outside `bounds` counts as the bound and has gradient 0, as in AdaMerging's code.
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
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> None:
        # Slice of [P], slice of the groups, and number of rows.
        self._parts: list[tuple[slice, slice, int]] = []
        count = 0
        for name, place in layout.places.items():
            shape = layout.shapes[name]
            rows = shape[0] if groups == "row" and shape else 1
            self._parts.append((place, slice(count, count + rows), rows))
            count += rows
        if groups == "encoder":
            self._parts, count = [(slice(layout.size), slice(1), 1)], 1
        super().__init__(torch.full((len(vectors), count), start, device=origin.device), lr=lr)
        self._origin, self._vectors, self._bounds = origin, vectors, bounds

    def clamped(self) -> torch.Tensor:
        return self.values.clamp(*self._bounds)

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        values = self.clamped()
        weights.copy_(self._origin)
        for place, groups, rows in self._parts:
            tau = self._vectors[:, place].view(len(values), rows, -1)
            weights[place] += torch.einsum("tr,trk->rk", values[:, groups], tau).reshape(-1)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        own = torch.empty_like(self.values)
        for place, groups, rows in self._parts:
            tau = self._vectors[:, place].view(len(own), rows, -1)
            own[:, groups] = torch.einsum("rk,trk->tr", gradient[place].view(rows, -1), tau)
        low, high = self._bounds
        return own * ((self.values >= low) & (self.values <= high))

    def measures(self) -> dict[str, float]:
        values = self.clamped()
        return {"least": float(values.min()), "mean": float(values.mean()), "most": float(values.max())}


class _Part(NamedTuple):
    """Slice of [P], slice of the gates, and for a matrix the factors U diag(s) [T, m, r] and Vh [T, r, k]."""

    place: slice
    gates: slice
    factors: tuple[torch.Tensor, torch.Tensor] | None


class Components(Gates):
    """One gate per task and singular component of a matrix: theta = theta_0 + sum_t U_t diag(g_t * s_t) V_t^T.

    tau_t = U_t diag(s_t) V_t^T is a matrix of a task vector. All gates start at 0. Other tensors, and embedding tables,
    have one gate per task. The gradient of g_t is s_t * diag(U_t^T dtheta V_t). In AdaRank (Lee et al. 2025, arXiv
    2503.22178), gates are binary and fitted by entropy.

    Letters: a matrix [m, k] with r = min(m, k) components; U [T, m, r], s [T, r], Vh [T, r, k].
    """

    def __init__(self, origin: torch.Tensor, vectors: torch.Tensor, layout: Layout, *, lr: float) -> None:
        self._parts: list[_Part] = []
        count = 0
        for name, place in layout.places.items():
            shape = layout.shapes[name]
            factors, rank = None, 1
            if len(shape) == 2 and min(shape) > 1 and not is_table(name):
                U, s, Vh = torch.linalg.svd(vectors[:, place].reshape(-1, *shape), full_matrices=False)
                factors, rank = ((U * s[:, None]).contiguous(), Vh.contiguous()), min(shape)
            self._parts.append(_Part(place, slice(count, count + rank), factors))
            count += rank
        super().__init__(torch.zeros(len(vectors), count, device=origin.device), lr=lr)
        self._origin, self._vectors = origin, vectors

    def write(self, weights: torch.Tensor, step: int = 0) -> None:
        weights.copy_(self._origin)
        for part in self._parts:
            gates = self.values[:, part.gates]
            if part.factors is None:
                weights[part.place] += gates[:, 0] @ self._vectors[:, part.place]
            else:
                U, Vh = part.factors
                weights[part.place] += torch.bmm(U * gates[:, None], Vh).sum(0).reshape(-1)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        own = torch.empty_like(self.values)
        for part in self._parts:
            change = gradient[part.place]
            if part.factors is None:
                own[:, part.gates] = (self._vectors[:, part.place] @ change)[:, None]
            else:
                U, Vh = part.factors
                own[:, part.gates] = ((U.mT @ change.view(U.shape[1], -1)) * Vh).sum(2)
        return own

    def measures(self) -> dict[str, float]:
        return {"least": float(self.values.min()), "most": float(self.values.max())}
