"""Devices, numbers of threads, and seeds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orthomerge.core.errors import OrthomergeError, RecipeError, nearest

if TYPE_CHECKING:
    import torch

THREADS = "ORTHOMERGE_THREADS"


def device_of(name: str) -> torch.device:
    """Return the device of a name; `auto` is the accelerator if there is one, else the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    available = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}; {nearest(name, ['auto', *available])}") from error
    if device.type not in available:
        raise RecipeError(f"device {name!r} is not available, torch finds {' and '.join(available)}; use 'auto'")
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise RecipeError(f"device {name!r} does not exist, the last one is '{device.type}:{count - 1}'; use 'auto'")
    return device


@contextmanager
def enough_memory(work: str, advice: str) -> Iterator[None]:
    """Replace errors for exhausted memory by one that names the work and gives advice."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for memory that runs out on a CPU.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise OrthomergeError(f"the device ran out of memory with {work}; {advice}") from error
        raise


def free_memory(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@contextmanager
def fixed_threads(number: int | None = None) -> Iterator[None]:
    """Set torch's number of threads (one, or $ORTHOMERGE_THREADS), on which the last digits of CPU results depend."""
    import torch

    text = os.environ.get(THREADS, "1")
    if number is None and (not text.isdecimal() or not int(text)):
        raise RecipeError(f"{THREADS} must be a number of threads, got {text!r}")
    before = torch.get_num_threads()
    torch.set_num_threads(number or int(text))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def derive(seed: int, *purpose: object) -> int:
    """Derive a seed for one purpose of a run, so that no generator state has to be stored."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
