"""Adam over batches of inputs in float32, reproducible by its seed; gradients in closed form, faster than autograd."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from orthomerge.core.adam import Adam, rate_share
from orthomerge.core.checks import at_least_one, fraction
from orthomerge.core.errors import NumericalError, RecipeError


@dataclass(frozen=True)
class Descent:
    """`steps` of `batch` inputs at rate `lr`, falling along a cosine with `decay`; `seed`: of the inputs' order."""

    steps: int = 1000
    lr: float = 1e-3
    batch: int = 16
    decay: bool = True
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, batch=self.batch)
        fraction(lr=self.lr)
        if not -(2**63) <= self.seed < 2**63:
            raise RecipeError("'seed' must be a whole number of at most 63 bits")

    def minimise(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        *,
        count: int,
        name: str,
        generator: torch.Generator | None = None,
    ) -> None:
        """Train `parameters` in place; `gradients(rows)` are theirs on a batch, row numbers [b] of `count` inputs."""
        states = [Adam(parameter) for parameter in parameters]
        generator = generator or torch.Generator().manual_seed(self.seed)
        for step, rows in enumerate(self._batches(count, generator, parameters[0].device)):
            lr = self.lr * rate_share(step, self.steps) if self.decay else self.lr
            for state, parameter, gradient in zip(states, parameters, gradients(rows), strict=True):
                state.step(parameter, gradient, lr)
        # One check suffices: Adam's means stay non-finite after a gradient that is.
        require_finite(parameters, name=name)

    def _batches(self, count: int, generator: torch.Generator, device: torch.device) -> Iterator[torch.Tensor]:
        if count <= self.batch:  # the order of all of them does not matter
            yield from repeat(torch.arange(count, device=device), self.steps)
            return
        left = self.steps
        while left > 0:
            batches = torch.split(torch.randperm(count, generator=generator).to(device), self.batch)[:left]
            yield from batches
            left -= len(batches)


def require_finite(tensors: Iterable[torch.Tensor], *, name: str) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise NumericalError(f"{name}: it is no longer finite; lower 'lr', or check the scale of features and head")
