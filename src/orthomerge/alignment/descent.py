"""Gradient descent for aligners: Adam on one batch of inputs after the other, in float32, reproducible by its seed.

Kingma and Ba 2015, arXiv 1412.6980. Aligners hand in their gradients: most are a few lines of algebra, and at these
sizes autograd takes thrice the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from orthomerge.core import adam as core
from orthomerge.core.checks import at_least_one
from orthomerge.core.errors import NumericalError, RecipeError


@dataclass(frozen=True)
class Adam:
    """`steps` of `batch` inputs; `decay` lets the learning rate `lr` fall to zero along a cosine."""

    steps: int
    lr: float
    batch: int
    decay: bool
    seed: int

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, batch=self.batch)
        if not 0 < self.lr <= 1:
            raise RecipeError(f"'lr' must be in (0, 1], got {self.lr}")
        if not -(2**63) <= self.seed < 2**63:
            raise RecipeError("'seed' must be a whole number of at most 63 bits")

    def minimise(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        *,
        count: int,
        generator: torch.Generator,
        name: str,
    ) -> None:
        """Change `parameters` in place; `gradients(rows)` are theirs on the rows [b] of a batch of `count` inputs.

        `generator`: what the order of inputs is drawn from. `name`: what is trained, for messages.
        """
        states = [core.Adam(parameter) for parameter in parameters]
        for step, rows in enumerate(self._batches(count, generator, parameters[0].device)):
            lr = self.lr * core.rate_share(step, self.steps) if self.decay else self.lr
            for state, parameter, gradient in zip(states, parameters, gradients(rows), strict=True):
                state.step(parameter, gradient, lr)
        # Once is enough: Adam's means never come back from a gradient that is not finite.
        require_finite(parameters, name=name)

    def _batches(self, count: int, generator: torch.Generator, device: torch.device) -> Iterator[torch.Tensor]:
        """Row numbers [b] of every step; each epoch goes through all rows in a new order."""
        if count <= self.batch:  # the order of all of them does not matter
            yield from repeat(torch.arange(count, device=device), self.steps)
            return
        left = self.steps
        while left > 0:
            batches = torch.split(torch.randperm(count, generator=generator).to(device), self.batch)[:left]
            yield from batches
            left -= len(batches)


def require_finite(tensors: Iterable[torch.Tensor], *, name: str) -> None:
    """Refuse what diverged."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise NumericalError(f"{name}: it is no longer finite; lower 'lr', or look at the scale of features and head")
