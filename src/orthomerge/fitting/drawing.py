"""What methods share that look at a few inputs of each task: the draw, the mean of the experts, heads on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.fitting.divergence import on_device

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs
    from orthomerge.fitting.kinds import Setting
    from orthomerge.models.heads import Head


def at_least_one(name: str, value: int) -> None:
    """Refuse a count of nothing."""
    if value < 1:
        raise RecipeError(f"{name!r} must be at least 1, got {value}")


def drawn(setting: Setting, count: int) -> Inputs:
    """`count` inputs of each task, by the seed; all where there are no more. Other tasks do not change a task's."""
    places = {}
    for task, targets in setting.inputs.targets.items():
        if not len(targets):
            raise RecipeError(f"task {task!r} has no inputs to look at; give it at least one")
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(setting.seed))
        places[task] = order[:count].sort().values
    return setting.inputs.at(places)


def mean_expert(setting: Setting) -> torch.Tensor:
    """The plain average of the experts, [P]; of equal experts it is that expert to the bit."""
    total = torch.zeros(setting.layout.size, dtype=torch.float64)
    for task in setting.tasks:
        total += setting.tuned(task)
    return (total / len(setting.tasks)).float()


def heads_on_device(setting: Setting) -> dict[str, Head]:
    """The experts' heads in float32 where the encoder is."""
    return {task: on_device(head, setting.device) for task, head in setting.heads.items()}
