"""Order statistics of each tensor apart: the k-th largest magnitude for every tensor and expert.

Tensors that fit are read once and looked at in memory; larger ones are streamed, first for a sample and
then for the counts, so that no more than about 250 MB are held, however large a tensor is. Both are exact.
"""

from collections.abc import Callable
from math import prod

import torch

from orthomerge.merging.kinds import Vectors
from orthomerge.merging.select import kth_largest, kth_largest_streamed

Thresholds = tuple[float, ...]

_BYTES = 192 << 20  # of deltas and scratch held at once
_STRIDE = 61  # of the elements sampled; shares no factor with the width of any layer


def tensor_quantiles(
    vectors: Vectors, ranks: Callable[[int], tuple[int, ...]], *, most: int = _BYTES
) -> dict[str, tuple[Thresholds, ...]]:
    """For every tensor and every rank that `ranks(count of elements)` names: one threshold an expert.

    Rank 0 gives infinity; a rank beyond the count gives 0.
    """
    return {
        key: _quantiles(vectors, key, ranks(prod(shape)), count=prod(shape), most=most)
        for key, shape in vectors.shapes.items()
    }


def _quantiles(vectors: Vectors, key: str, ranks: tuple[int, ...], *, count: int, most: int) -> tuple[Thresholds, ...]:
    experts = len(vectors.tasks)
    if not any(0 < rank <= count for rank in ranks):
        return tuple(((0.0 if rank > 0 else float("inf")),) * experts for rank in ranks)
    if 4 * count * (experts + 2) <= most:  # two rows of scratch
        rows = _whole(vectors, key, count)
        return tuple(tuple(kth_largest(row, rank) for row in rows) for rank in ranks)
    sample = _sample(vectors, key, count)
    return tuple(_streamed(vectors, key, rank, sample=[sample], count=count) for rank in ranks)


def _sample(vectors: Vectors, key: str, count: int) -> torch.Tensor:
    """Every `_STRIDE`-th element of a tensor, [T, n], in one piece: many small ones would pin the blocks' memory."""
    experts = len(vectors.tasks)
    held = torch.empty((experts, -(-count // _STRIDE) + count // _STRIDE), dtype=torch.float32)
    filled = 0
    for block in vectors.blocks(keys=(key,)):
        part = block.deltas.reshape(experts, -1)[:, ::_STRIDE]
        if filled + part.shape[1] > held.shape[1]:
            break
        held[:, filled : filled + part.shape[1]] = part
        filled += part.shape[1]
    return held[:, :filled]


def _whole(vectors: Vectors, key: str, count: int) -> torch.Tensor:
    """All experts' deltas of one tensor, [T, count]."""
    experts = len(vectors.tasks)
    rows: torch.Tensor | None = None
    for block in vectors.blocks(keys=(key,)):
        deltas = block.deltas.reshape(experts, -1)
        if deltas.shape[1] == count:
            return deltas
        if rows is None:
            rows = deltas.new_empty((experts, count))
        rows[:, block.site.start : block.site.start + deltas.shape[1]] = deltas
    assert rows is not None  # noqa: S101 - a rank above zero means that the tensor has elements
    return rows


def _streamed(vectors: Vectors, key: str, rank: int, *, sample: list[torch.Tensor], count: int) -> Thresholds:
    return kth_largest_streamed(
        lambda: (block.deltas for block in vectors.blocks(keys=(key,))),
        (rank,) * len(vectors.tasks),
        sample=sample,
        count=count,
    )
