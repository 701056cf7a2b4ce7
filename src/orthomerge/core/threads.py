"""Fix the number of threads of torch where results depend on it: one, or $ORTHOMERGE_THREADS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from orthomerge.core.errors import RecipeError

THREADS = "ORTHOMERGE_THREADS"


@contextmanager
def fixed_threads() -> Iterator[None]:
    """Set the number of threads inside the block; results on a GPU do not depend on it.

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
