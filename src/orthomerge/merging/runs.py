"""The tensors again, in runs of one fixed length whatever the size of the blocks.

Sums of floating-point numbers depend on how they are cut. Statistics that add over a tensor (norms, inner
products) are taken over these runs, in float64, so that they are the same bits for every size of block.
"""

from collections.abc import Iterator
from math import prod

import torch

from orthomerge.merging.kinds import Site, Vectors

_RUN = 1 << 15


def runs(vectors: Vectors) -> Iterator[tuple[Site, torch.Tensor]]:
    """Where each run lies and what it holds: [1 + T, n] float64, the base and then the deltas.

    The tensor is written over by the next run.
    """
    held = torch.empty((1 + len(vectors.tasks), _RUN), dtype=torch.float64)
    filled = 0
    for block in vectors.blocks():
        site = block.site
        count, stop = block.base.numel(), prod(site.shape)
        base, deltas = block.base.reshape(-1), block.deltas.reshape(-1, count)
        taken = 0
        while taken < count:
            step = min(_RUN - filled, count - taken)
            held[0, filled : filled + step] = base[taken : taken + step]
            held[1:, filled : filled + step] = deltas[:, taken : taken + step]
            filled += step
            taken += step
            if filled == _RUN or site.start + taken == stop:
                yield Site(site.key, site.shape, site.start + taken - filled, site.tasks), held[:, :filled]
                filled = 0
