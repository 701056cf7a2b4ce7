"""The hash that identifies files: BLAKE3 where it is installed, SHA-256 otherwise; a digest says which it is.

A merge hashes every byte that it reads and writes. BLAKE3 is as strong as SHA-256 and several times as fast, which
would otherwise be most of what a merge costs.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from typing import Protocol

from orthomerge.core.errors import CheckpointError


class Hash(Protocol):
    """What hashlib's objects and blake3's have in common."""

    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


def preferred() -> str:
    """The algorithm for new digests."""
    return "blake3" if find_spec("blake3") else "sha256"


def new_hash(algorithm: str) -> Hash:
    """A hash to feed; `algorithm` is `blake3` or `sha256`."""
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm != "blake3":
        raise CheckpointError(f"unknown hash {algorithm!r}; this version knows blake3 and sha256: update orthomerge")
    try:
        from blake3 import blake3
    except ImportError as error:
        raise CheckpointError("these files were hashed with BLAKE3; pip install blake3 to check them") from error
    hash_: Hash = blake3()
    return hash_


def is_digest_of(data: bytes, expected: str) -> bool:
    """Whether bytes have a digest."""
    hash_ = new_hash(algorithm_of(expected))
    hash_.update(data)
    return expected.partition(":")[2] == hash_.hexdigest()


def algorithm_of(digest: str) -> str:
    """The algorithm of a digest such as `blake3:1f2e...`."""
    algorithm, colon, _ = digest.partition(":")
    if not colon:
        raise CheckpointError(f"{digest[:20]!r} is no digest of the form ALGORITHM:HEX; the manifest is damaged")
    return algorithm
