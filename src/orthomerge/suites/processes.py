"""Calls done side by side in processes; the work of a small model is mostly Python's, which threads cannot share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import torch

from orthomerge.errors import lost_worker

__all__ = ["side_by_side"]

Made = TypeVar("Made")


def side_by_side(calls: Sequence[Callable[[], Made]], *, workers: int, threads: int) -> Iterator[tuple[int, Made]]:
    """The number of each call and what it returned, as they come; begun in order, each with so many threads."""
    pool = ProcessPoolExecutor(min(workers, len(calls)), get_context("spawn"), torch.set_num_threads, (threads,))
    try:
        numbers = {pool.submit(call): number for number, call in enumerate(calls)}
        for future in as_completed(numbers):
            yield numbers[future], future.result()
    except BrokenProcessPool as error:
        raise lost_worker() from error
    finally:
        pool.shutdown(cancel_futures=True)
