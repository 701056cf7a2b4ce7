"""Fix the number of threads of torch where results depend on it: one, or $ORTHOMERGE_THREADS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from orthomerge.core.errors import RecipeError

THREADS = "ORTHOMERGE_THREADS"


@contextmanager
def fixed_threads(number: int | None = None) -> Iterator[None]:
    """Set the number of torch's threads inside the block; None is that of the environment, or one.

    Gradients and sums are shared among threads: with another number of them the last digits are others, and so is what
    comes of them. One thread gives the same bytes on every machine of a kind.
    """
    import torch

    text = os.environ.get(THREADS, "1")
    if number is None and (not text.isdecimal() or not int(text)):
        raise RecipeError(f"{THREADS} must be a number of threads, got {text!r}")
    before = torch.get_num_threads()
    torch.set_num_threads(number or int(text))
    try:
        yield
    finally:
        torch.set_num_threads(before)
