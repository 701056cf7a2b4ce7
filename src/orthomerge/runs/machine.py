"""On what machine a run is made, and with what versions."""

from __future__ import annotations

import os
import platform
import resource
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from orthomerge.core.version import VERSION


def peak_memory() -> int:
    """Bytes that this process had in memory at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine() -> str:
    """Processor, cores, memory, system and, if torch sees one, the GPU."""
    import torch

    processor = platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    system = f"{platform.system()} {platform.release()}"
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}{gpu}"


def versions() -> dict[str, str]:
    """The versions of whatever can change a number."""
    installed = {"orthomerge": VERSION, "python": platform.python_version()}
    for name in ("torch", "numpy", "transformers"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
