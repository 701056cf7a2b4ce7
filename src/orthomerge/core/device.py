"""The device that a name stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError, nearest

if TYPE_CHECKING:
    import torch


def device_of(name: str) -> torch.device:
    """The device of a name; `auto` is the accelerator where there is one, else the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}; {nearest(name, ['auto', *here])}") from error
    if device.type not in here:
        raise RecipeError(f"device {name!r} is not available, torch finds {' and '.join(here)} here; use 'auto'")
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise RecipeError(f"device {name!r} does not exist, the last one is '{device.type}:{count - 1}'; use 'auto'")
    return device
