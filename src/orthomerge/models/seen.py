"""Short hashes of the inputs that a fit or an alignment has seen, kept on this machine only."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from orthomerge.data.task import Examples


_LENGTH = 12  # hexadecimal digits: enough to recognise an input, too few to be worth much to anybody else


def short_hashes(examples: Examples) -> tuple[str, ...]:
    """One hash per input, in order."""
    return tuple(_hash(item) for item in examples.inputs)


def _hash(item: object) -> str:
    data = item.encode() if isinstance(item, str) else np.ascontiguousarray(item).tobytes()
    return hashlib.sha256(data).hexdigest()[:_LENGTH]
