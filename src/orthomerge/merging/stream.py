"""The engine: read a block, merge it, hand it on, in order and in bounded memory.

One thread reads (and so hashes the input files on the way), a few merge, and the caller writes. Every block is computed
by one thread with torch's own threading off, so the bytes do not depend on how many threads there are.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from orthomerge.errors import NumericalError
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod, Vectors

if TYPE_CHECKING:
    from orthomerge.merging.vectors import TaskVectors

__all__ = ["MEMORY", "merge_blocks", "prepare", "single_threaded"]

Item = TypeVar("Item")
Result = TypeVar("Result")

MEMORY = 64 << 20  # bytes of blocks under way by default
_SCRATCH = 4  # rows of a block beside the deltas: base, result, and what a method needs


@contextmanager
def single_threaded() -> Iterator[None]:
    """Turn torch's threads off inside; results then depend on the data alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare(method: TensorMethod | SurveyMethod, vectors: Vectors) -> TensorMethod:
    """Let a survey method take its look; a tensor method is ready as it is."""
    with single_threaded():
        return method.survey(vectors) if hasattr(method, "survey") else method


def merge_blocks(
    vectors: TaskVectors,
    method: TensorMethod,
    finish: Callable[[Block, torch.Tensor], Result],
    *,
    workers: int | None = None,
    memory: int = MEMORY,
) -> Generator[Result, None, None]:
    """Merge every block and yield `finish(block, merged weights)` in streaming order.

    At most `memory` bytes of blocks are under way at once; a single block that is larger goes through alone. Close it:
    a thread that is still reading when the interpreter ends takes the whole process down.
    """

    def merge(block: Block) -> Result:
        torch.set_num_threads(1)  # OpenMP keeps this per thread
        _refuse_non_finite(block, vectors)
        delta = method.merge(block.base, block.deltas, site=block.site)
        return finish(block, torch.add(block.base, delta))

    budget = _Budget(memory)
    with single_threaded(), closing(_ahead(vectors, method, budget)) as blocks:
        yield from _ordered(merge, blocks, budget, workers or min(os.cpu_count() or 1, 8))


def _refuse_non_finite(block: Block, vectors: TaskVectors) -> None:
    # A sum is finite only if all its terms are; only when it is not, look which.
    if torch.isfinite(block.deltas.sum()):
        return
    key = block.site.key
    suspects = [("the base", vectors.base.origin(key), block.base)]
    for (task, vector), delta in zip(vectors.vectors.items(), block.deltas, strict=True):
        suspects.append((f"expert {task!r}", ", ".join(source.origin(key) for _, source in vector.terms), delta))
    for who, origin, values in suspects:
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise NumericalError(
                f"{key!r} holds NaN or infinity in {who} ({origin}): {bad} of {values.numel()} elements from "
                f"element {block.site.start} on; it cannot be merged: find a sound checkpoint, or leave it out"
            )


class _Budget:
    """Bytes that may be under way; whoever would exceed it waits, unless nothing else is."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> bool:
        """Wait for room; False once the consumer has gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._used or self._used + size <= self._limit)
            self._used += size
            return not self._closed

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _ordered(
    merge: Callable[[Block], Result], blocks: Iterator[tuple[int, Block]], budget: _Budget, workers: int
) -> Iterator[Result]:
    """Map over threads, in order, few blocks under way; the bytes of a block are free once its result is taken."""
    with ThreadPoolExecutor(workers, thread_name_prefix="orthomerge-merge") as pool:
        pending: deque[tuple[int, Future[Result]]] = deque()

        def take() -> Iterator[Result]:
            size, future = pending.popleft()
            result = future.result()
            budget.give(size)
            yield result

        try:
            for size, block in blocks:
                pending.append((size, pool.submit(merge, block)))
                del block
                while len(pending) > workers or (pending and pending[0][1].done()):
                    yield from take()
            while pending:
                yield from take()
        finally:
            budget.close()
            for _, future in pending:
                future.cancel()


def _ahead(vectors: TaskVectors, method: TensorMethod, budget: _Budget) -> Generator[tuple[int, Block], None, None]:
    """Read blocks in a thread of their own, as far ahead as the budget allows."""
    ready: queue.SimpleQueue[tuple[int, Block] | BaseException | None] = queue.SimpleQueue()
    rows = len(vectors.tasks) + _SCRATCH

    def read() -> None:
        torch.set_num_threads(1)
        try:
            for site, stop in vectors.sites(scope=method.scope):
                size = 4 * rows * (stop - site.start)
                if not budget.take(size):
                    return
                ready.put((size, vectors.block(site, stop)))
            ready.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by the consumer
            ready.put(error)

    thread = threading.Thread(target=read, name="orthomerge-read", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        budget.close()
        thread.join()
