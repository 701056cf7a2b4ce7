"""How many threads torch has where sums decide the bytes: one, or as many as $ORTHOMERGE_THREADS says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from orthomerge.core.errors import RecipeError

THREADS = "ORTHOMERGE_THREADS"


@contextmanager
def fixed_threads() -> Iterator[None]:
    """The same number inside, whatever the machine has; a GPU does not care.

    Gradients and sums are shared among threads: with another number of them the last digits are others, and so is what
    comes of them. One thread gives the same bytes on every machine of a kind.
    """
    import torch

    number = os.environ.get(THREADS, "1")
    if not number.isdecimal() or not int(number):
        raise RecipeError(f"{THREADS} must be a number of threads, got {number!r}")
    before = torch.get_num_threads()
    torch.set_num_threads(int(number))
    try:
        yield
    finally:
        torch.set_num_threads(before)
