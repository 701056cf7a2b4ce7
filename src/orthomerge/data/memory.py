"""How much memory there is, asked before anything large is unpacked."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PLENTY = 1 << 62  # where the system does not tell


def free_memory() -> int:
    """Bytes that can be taken without swapping; very many where nobody knows."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return _PLENTY
