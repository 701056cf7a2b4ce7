"""The engine: read a block, merge it, hand it on, in order and in bounded memory.

One thread reads (and so hashes the input files on the way), a few merge, and the caller writes. Every block is computed
by one thread with torch's own threading off, so the bytes do not depend on how many threads there are.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from orthomerge.core.errors import NumericalError
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod, Vectors

if TYPE_CHECKING:
    from orthomerge.merging.vectors import TaskVectors


Item = TypeVar("Item")
Result = TypeVar("Result")

MEMORY = 64 << 20  # bytes of blocks under way by default
_SCRATCH = 4  # rows of a block beside the deltas: base, result, and what a method needs


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch has no class of its own for that on a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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

    count = workers or min(os.cpu_count() or 1, 8)
    with single_threaded(), closing(_stream(vectors, method, merge, workers=count, memory=memory)) as results:
        yield from results


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


def _stream(
    vectors: TaskVectors, method: TensorMethod, merge: Callable[[Block], Result], *, workers: int, memory: int
) -> Generator[Result, None, None]:
    """One thread reads blocks and hands them to the pool; the caller takes the results in that order.

    Only the budget limits how much is under way. Whoever waits for it waits for results that are already promised, and
    the caller always takes the oldest, so nobody waits for ever.
    """
    budget = _Budget(memory)
    promised: queue.SimpleQueue[tuple[int, Future[Result]] | BaseException | None] = queue.SimpleQueue()
    rows = len(vectors.tasks) + _SCRATCH
    pool = ThreadPoolExecutor(workers, thread_name_prefix="orthomerge-merge")

    def read() -> None:
        torch.set_num_threads(1)
        try:
            for site, stop in vectors.sites(scope=method.scope):
                size = 4 * rows * (stop - site.start)
                if not budget.take(size):
                    return
                promised.put((size, pool.submit(merge, vectors.block(site, stop))))
            promised.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by the consumer
            promised.put(error)

    reader = threading.Thread(target=read, name="orthomerge-read", daemon=True)
    reader.start()
    try:
        while (item := promised.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            size, future = item
            result = future.result()
            budget.give(size)
            yield result
    finally:
        budget.close()
        reader.join()
        pool.shutdown(cancel_futures=True)
