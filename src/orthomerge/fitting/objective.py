"""What a fit minimises: a function of the features that the encoder makes of one batch over all tasks.

Every task gives the same number B of inputs to a batch, in the order of the tasks, so that features are [T, B, d].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from orthomerge.heads import Classifier

__all__ = ["Objective"]


class Objective(Protocol):
    """`parameters` are trained along with the encoder, by Adam with `lr`; there may be none."""

    parameters: list[torch.Tensor]
    lr: float

    def loss(self, features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Of features [T, B, d] of the inputs in `rows` [T, B]; a sum over the tasks."""
        ...

    def penalty(self) -> torch.Tensor | None:
        """Of the parameters alone; not part of a held-out loss."""
        ...

    def judge(self, features: torch.Tensor, rows: torch.Tensor, task: str) -> torch.Tensor:
        """The loss of each input of one task, [n]: what a held-out loss is the mean of."""
        ...

    def classifiers(self) -> Mapping[str, Classifier]:
        """The heads with whatever was trained, absorbed."""
        ...

    def measures(self) -> dict[str, float]:
        """What else to report at a look."""
        ...
