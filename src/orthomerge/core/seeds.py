"""Seeds derived from one seed, so that no random number depends on a state that would have to be kept."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: object) -> int:
    """The seed for one purpose and place of a run."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
