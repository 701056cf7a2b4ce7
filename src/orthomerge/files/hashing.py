"""Hash files: BLAKE3, or SHA-256 to check files of earlier versions. A digest names its algorithm.

A merge hashes every byte that it reads and writes. BLAKE3 is as strong as SHA-256 and several times as fast, which
would otherwise be most of what a merge costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from orthomerge.core.errors import CheckpointError

_ALGORITHMS: Mapping[str, Any] = {"blake3": blake3, "sha256": hashlib.sha256}


class Hasher:
    """A running hash; its digest looks like `blake3:1f2e...`."""

    def __init__(self, algorithm: str | None = None) -> None:
        self._algorithm = algorithm or "blake3"
        if self._algorithm not in _ALGORITHMS:
            names = " and ".join(_ALGORITHMS)
            raise CheckpointError(f"unknown hash {algorithm!r}; this version knows {names}: update orthomerge")
        self._hash = _ALGORITHMS[self._algorithm]()

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)

    def digest(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def is_digest_of(data: bytes, expected: str) -> bool:
    """Return whether bytes have the expected digest."""
    hasher = Hasher(algorithm_of(expected))
    hasher.update(data)
    return hasher.digest() == expected


def algorithm_of(digest: str) -> str:
    """Return the algorithm of a digest."""
    algorithm, colon, _ = digest.partition(":")
    if not colon:
        raise CheckpointError(f"{digest[:20]!r} is no digest of the form ALGORITHM:HEX; the manifest is damaged")
    return algorithm
