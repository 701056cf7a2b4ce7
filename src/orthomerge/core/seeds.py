"""Derive seeds from one seed, so that no generator state has to be stored."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: object) -> int:
    """Derive the seed for one purpose and place of a run."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
