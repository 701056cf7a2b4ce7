"""Gradient descent for aligners: Adam on one batch of inputs after the other, in float32, reproducible by its seed.

Kingma and Ba 2015, arXiv 1412.6980. Aligners hand in their gradients: most are a few lines of algebra, and at these
sizes autograd takes thrice the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from orthomerge.core.errors import NumericalError, RecipeError

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


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
        means, squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
        for step, rows in enumerate(self._batches(count, generator, parameters[0].device)):
            found = gradients(rows)
            lr = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2 if self.decay else self.lr
            size, root = lr / (1 - _BETA_1 ** (step + 1)), math.sqrt(1 - _BETA_2 ** (step + 1))
            with torch.no_grad():
                for parameter, gradient, mean, square in zip(parameters, found, means, squares, strict=True):
                    mean.lerp_(gradient, 1 - _BETA_1)
                    square.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
                    parameter.addcdiv_(mean, square.sqrt().div_(root).add_(_EPSILON), value=-size)
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


def at_least_one(**counts: int | None) -> None:
    """Refuse counts of zero and less."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise RecipeError(f"{name!r} must be at least 1, got {count}")


def not_negative(**weights: float) -> None:
    """Refuse weights of a penalty that are below zero, infinite or NaN."""
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise RecipeError(f"{name!r} must be a number of at least 0, got {weight}")
