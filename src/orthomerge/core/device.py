"""Devices: which one a name stands for, how much of its memory is free, and an error with advice when it runs out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orthomerge.core.errors import OrthomergeError, RecipeError, nearest

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


@contextmanager
def enough_memory(work: str, advice: str) -> Iterator[None]:
    """Turn torch's error for exhausted device memory into one that names the work and says what to do."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OrthomergeError(f"the device ran out of memory with {work}; {advice}") from error


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
