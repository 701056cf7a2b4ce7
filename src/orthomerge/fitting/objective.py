"""What a fit minimises: a function of the features that the encoder makes of one batch over all tasks.

Every task gives the same number B of targets to a batch, in the order of the tasks, so that features are [T, B, d].
Targets are named by their numbers in `Inputs`; each counts as much as its weight says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from orthomerge.fitting.inputs import Inputs, Targets
    from orthomerge.models.heads import Classifier


class Objective(Protocol):
    """`inputs`: whose targets are trained on. `parameters` are trained along with the encoder, by Adam with `lr`."""

    inputs: Inputs
    parameters: list[torch.Tensor]
    lr: float

    def loss(self, features: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Of features [T, B, d] of the targets in `numbers` [T, B]: each task's mean of weighted terms, summed."""
        ...

    def penalty(self) -> torch.Tensor | None:
        """Of the parameters alone; not part of a held-out loss."""
        ...

    def judge(self, features: torch.Tensor, targets: Targets, task: str) -> torch.Tensor:
        """The loss of each target of one task, [n], not weighted: what a held-out loss is the weighted mean of."""
        ...

    def classifiers(self) -> Mapping[str, Classifier]:
        """The heads with whatever was trained, absorbed."""
        ...

    def measures(self) -> dict[str, float]:
        """What else to report at a look."""
        ...
