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
    """Find the device of a name; `auto` is the accelerator if there is one, else the CPU."""
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
    """Free memory of a device, in bytes."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@contextmanager
def fixed_threads(number: int | None = None) -> Iterator[None]:
    """Set the number of threads of torch inside the block: one, or $ORTHOMERGE_THREADS.

    Gradients and sums are shared among threads, so the last digits of results on a CPU depend on their number.
    """
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
    """Derive the seed for one purpose and place of a run, so that no generator state has to be stored."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
