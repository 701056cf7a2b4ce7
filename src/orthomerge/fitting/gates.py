"""How an encoder's weights depend on what is trained; each kind knows its weights and the gradient that reaches it.

The encoder computes with ordinary weights [P] and autograd gives their gradient [P], once a step and whatever the
number of tasks; gates turn that into a step of their own parameters and write the new weights. So a step costs one pass
over P elements more than plain fine-tuning, and no graph is ever built over the gates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Gates(Protocol):
    """`size`: how many numbers are trained."""

    @property
    def size(self) -> int: ...

    def write(self, weights: torch.Tensor) -> None:
        """Fill in the weights [P] that the present parameters stand for."""
        ...

    def step(self, gradient: torch.Tensor, weights: torch.Tensor, share: float) -> None:
        """One step against the gradient [P] of the weights, at a share of the full rate; then `write`."""
        ...

    def measures(self) -> dict[str, float]:
        """What to report at a look."""
        ...

    def kept(self) -> torch.Tensor:
        """A copy of what is trained, for `restore`."""
        ...

    def restore(self, kept: torch.Tensor) -> None: ...

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...
