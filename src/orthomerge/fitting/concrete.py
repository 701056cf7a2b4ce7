"""A shared random mask over a vector: theta = theta_b + m' V, with m' = m / mean(m), tensor by tensor.

Tang et al. 2023, arXiv 2312.06173. m = sigma((x + logit(u)) / temperature) is a relaxed Bernoulli sample with logits x,
drawn anew every step; which one depends on the seed and the step alone. The gradient that reaches x is

    (dtheta V - mean(dtheta V m')) m' (1 - m) / temperature,

the mean over the tensor: its second term is what the division by mean(m) adds. A tensor of one element has m' = 1.

Letters: x, m, m', u, V, theta [P].
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.fitting.adam import FlatAdam
from orthomerge.fitting.layout import Layout
from orthomerge.tuning.settings import derive

Final = Literal["sample", "expected", "binary"]
FINALS: tuple[Final, ...] = ("sample", "expected", "binary")

_LEAST = 1e-7  # of u, and of a mean


class ConcreteMask:
    """`vector`: V, which may be changed between steps. `mask`: m' of the present sample."""

    def __init__(
        self,
        base: torch.Tensor,
        vector: torch.Tensor,
        layout: Layout,
        *,
        temperature: float = 0.5,
        lr: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.vector, self.logits, self.mask = vector, torch.zeros_like(base), torch.ones_like(base)
        self._base, self._places = base, list(layout.places.values())
        self._temperature, self._lr, self._seed = temperature, lr, seed
        self._means = [torch.ones(()) for _ in self._places]  # mean(m), a tensor each
        self._adam = FlatAdam(len(base), base.device)
        self._draw()

    @property
    def size(self) -> int:
        return len(self.logits)

    def write(self, weights: torch.Tensor) -> None:
        torch.addcmul(self._base, self.mask, self.vector, out=weights)

    def gradient(self, gradient: torch.Tensor, number: int) -> torch.Tensor:
        """That of the logits of one tensor, from that of the weights [P]."""
        place = self._places[number]
        scaled, reached = self.mask[place], gradient[place] * self.vector[place]
        reached -= (reached * scaled).mean()
        return reached.mul_(scaled).mul_(1 - scaled * self._means[number]).div_(self._temperature)

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        self._adam.begin()
        for number, place in enumerate(self._places):
            self._adam.update(self.logits, place, self.gradient(gradient, number), self._lr * share)
        self._draw()
        self.write(weights)

    def final(self, form: Final) -> torch.Tensor:
        """What to end with, as m' [P]: the present sample, sigma(x / temperature), or one where x is not negative."""
        if form == "sample":
            return self.mask
        found = torch.ones_like(self.mask)
        for place in self._places:
            logits = self.logits[place]
            m = (logits >= 0).float() if form == "binary" else torch.sigmoid(logits / self._temperature)
            found[place] = m / m.mean().clamp_min(_LEAST)
        return found

    def measures(self) -> dict[str, float]:
        """`masked`: the share of the elements of V, zeros aside, that are more likely off than on."""
        live = self.vector != 0
        return {"masked": float(((self.logits < 0) & live).sum()) / max(int(live.sum()), 1)}

    def kept(self) -> torch.Tensor:
        return self.logits.clone()

    def restore(self, kept: torch.Tensor) -> None:
        self.logits.copy_(kept)
        self._draw()

    def state(self) -> dict[str, Any]:
        return {"logits": self.logits, "adam": self._adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.logits.copy_(state["logits"])
        self._adam.load(state["adam"])
        self._draw()

    def _draw(self) -> None:
        generator = torch.Generator(self.mask.device)
        generator.manual_seed(derive(self._seed, "concrete", self._adam.steps))
        for number, place in enumerate(self._places):
            logits = self.logits[place]
            noise = torch.rand(logits.shape, generator=generator, device=logits.device).logit_(_LEAST)
            m = noise.add_(logits).div_(self._temperature).sigmoid_()
            self._means[number] = m.mean().clamp_min(_LEAST)
            self.mask[place] = m.div_(self._means[number])


def check_temperature(temperature: float) -> None:
    """Refuse what no sample can be drawn at."""
    if not 0 < temperature < float("inf"):
        raise RecipeError(f"'temperature' must be positive, got {temperature}; the paper's is 0.5")
