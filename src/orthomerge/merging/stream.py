"""Read blocks, merge them in a few threads, and yield them in order with bounded memory.

The caller's thread reads, so that files are hashed in order. One thread computes each block: results are reproducible.
"""

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import NumericalError
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod, Vectors
from orthomerge.merging.vectors import TaskVectors

Result = TypeVar("Result")

MEMORY = 64 << 20  # bytes of blocks in progress by default
_SCRATCH = 4  # rows of a block beside the deltas: base, result, and what a method needs


def prepare(method: TensorMethod | SurveyMethod, vectors: Vectors) -> TensorMethod:
    """Run the survey of a survey method; return a tensor method as it is."""
    with fixed_threads(1):
        return method.survey(vectors) if hasattr(method, "survey") else method


def merge_blocks(
    vectors: TaskVectors,
    method: TensorMethod,
    finish: Callable[[Block, torch.Tensor], Result],
    *,
    workers: int | None = None,
    memory: int = MEMORY,
) -> Generator[Result, None, None]:
    """Merge every block and yield `finish(block, merged weights)` in streaming order, the weights on the CPU.

    At most `memory` bytes of blocks, or one larger block, are in progress. Close a generator that is not exhausted.
    """

    def merge(block: Block) -> Result:
        torch.set_num_threads(1)  # OpenMP keeps this per thread
        _refuse_non_finite(block, vectors)
        delta = method.merge(block.base, block.deltas, site=block.site)
        return finish(block, torch.add(block.base, delta).cpu())

    if vectors.device is not None:
        # torch loads its library of decompositions at the first call, which two threads must not make at once.
        torch.linalg.eigvalsh(torch.eye(2, device=vectors.device))
    rows, used = len(vectors.tasks) + _SCRATCH, 0
    pending: deque[tuple[int, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 8), thread_name_prefix="orthomerge-merge")
    try:
        with fixed_threads(1):
            for site, stop in vectors.sites(scope=method.scope):
                size = 4 * rows * (stop - site.start)
                while pending and used + size > memory:
                    oldest, future = pending.popleft()
                    yield future.result()
                    used -= oldest
                pending.append((size, pool.submit(merge, vectors.block(site, stop))))
                used += size
            while pending:
                yield pending.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _refuse_non_finite(block: Block, vectors: TaskVectors) -> None:
    # A sum is finite only if all its terms are.
    if torch.isfinite(block.deltas.sum()):
        return
    key = block.site.key
    suspects = [("the base", vectors.base.origin(key), block.base)]
    for (task, vector), delta in zip(vectors.vectors.items(), block.deltas, strict=True):
        suspects.append((f"expert {task!r}", ", ".join(source.origin(key) for _, source in vector.terms), delta))
    for who, origin, values in suspects:
        count = int((~torch.isfinite(values)).sum())
        if count:
            raise NumericalError(
                f"{key!r} holds NaN or infinity in {who} ({origin}): {count} of {values.numel()} elements from "
                f"element {block.site.start} on; it cannot be merged: find a sound checkpoint, or leave it out"
            )
