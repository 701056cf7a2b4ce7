"""Device memory: how much is free, and an error with advice when it runs out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orthomerge.core.errors import OrthomergeError

if TYPE_CHECKING:
    import torch


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
