"""The merge without data that a fitted method starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from orthomerge.fitting.kinds import Setting


def start_vector(setting: Setting, method: str, options: Mapping[str, Any]) -> torch.Tensor:
    """What a merge adds to the base, scale and all: [P] on the device."""
    return (setting.merged(method, options) - setting.base).to(setting.device)


def task_vectors(setting: Setting) -> torch.Tensor:
    """All task vectors, [T, P] on the device."""
    found = torch.empty(len(setting.tasks), setting.layout.size, device=setting.device)
    for number, task in enumerate(setting.tasks):
        found[number] = setting.tuned(task) - setting.base
    return found


def summed_vectors(setting: Setting) -> torch.Tensor:
    """The sum of all task vectors, [P] on the device."""
    found = torch.zeros(setting.layout.size)
    for task in setting.tasks:
        found += setting.tuned(task) - setting.base
    return found.to(setting.device)


def elected_vectors(setting: Setting, vectors: torch.Tensor, density: float) -> torch.Tensor:
    """Task vectors [T, P] as TIES leaves them: trimmed to a share of their entries, and only those of elected sign."""
    count = sum(place.stop - place.start for place in setting.layout.places.values())
    kept = max(int(density * count), 1)
    found = torch.empty_like(vectors)
    for number, vector in enumerate(vectors):
        size = vector.abs()
        limit = size.kthvalue(len(size) - kept + 1).values
        found[number] = vector * (size >= limit)
    sign = torch.copysign(torch.ones((), device=vectors.device), found.sum(0))
    return found.mul_(found * sign > 0)
