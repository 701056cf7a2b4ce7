"""Gram matrices and k-th largest magnitudes of task vectors, in streamed passes.

Results do not depend on the size of blocks: sums are taken in float64 over runs of one length, and order statistics
are exact.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf, prod
from typing import Any

import numpy as np
import torch

from orthomerge.merging.kinds import STRIDE, Site, Vectors

Thresholds = tuple[float, ...]  # one per expert

_Bits = np.ndarray[tuple[int], np.dtype[np.int32]]
_Counts = np.ndarray[tuple[int], np.dtype[np.int64]]

_RUN = 1 << 15  # elements
_Pair = tuple[int, int]  # place of a rank, and row
_NEAR = 3  # intervals of upper bits that a sample suggests
_UPPER, _LOWER = 15, 16  # bits of a magnitude, whose sign bit is clear


def runs(vectors: Vectors) -> Iterator[tuple[Site, torch.Tensor]]:
    """Yield site and values [1 + T, n] of each run in float64, the base first; the next run overwrites them."""
    values = torch.empty((1 + len(vectors.tasks), _RUN), dtype=torch.float64)
    filled = 0
    for block in vectors.blocks():
        site = block.site
        count, stop = block.base.numel(), prod(site.shape)
        base, deltas = block.base.reshape(-1), block.deltas.reshape(-1, count)
        taken = 0
        while taken < count:
            step = min(_RUN - filled, count - taken)
            values[0, filled : filled + step] = base[taken : taken + step]
            values[1:, filled : filled + step] = deltas[:, taken : taken + step]
            filled += step
            taken += step
            if filled == _RUN or site.start + taken == stop:
                yield Site(site.key, site.shape, site.start + taken - filled, site.tasks), values[:, :filled]
                filled = 0


def grams(vectors: Vectors) -> dict[str, torch.Tensor]:
    """Gram matrix [1 + T, 1 + T] of each tensor that has elements, in float64: row 0 the base, row t delta t."""
    result: dict[str, torch.Tensor] = {}
    for site, values in runs(vectors):
        product = values @ values.T
        result[site.key] = result[site.key].add_(product) if site.key in result else product
    return result


def thresholds(
    vectors: Vectors, ranks: Callable[[int], tuple[int, ...]], *, keys: tuple[str, ...] | None = None
) -> tuple[Thresholds, ...]:
    """Return the `ranks(count)`-th largest magnitudes among the `count` elements of all tensors, or of `keys`."""
    count = sum(prod(vectors.shapes[key]) for key in keys or vectors.shapes)
    return kth_largest(
        lambda: (block.deltas for block in vectors.blocks(keys=keys)),
        ranks(count),
        rows=len(vectors.tasks),
        count=count,
        sample=((block.site, block.deltas) for block in vectors.sample()) if keys is None else (),
    )


def kth_largest(
    stream: Callable[[], Iterable[torch.Tensor]],
    ranks: Sequence[int],
    *,
    rows: int,
    count: int,
    sample: Iterable[tuple[Site, torch.Tensor]] = (),
) -> tuple[Thresholds, ...]:
    """Return the k-th largest magnitude of each row, per rank k, in the blocks [rows, ...] of `stream()`.

    Rank 0 gives infinity, a rank beyond `count`, the length of a row, gives 0. Magnitudes of float32 numbers compare
    like their bits read as integers: a pass counts the upper bits, which leaves one interval per rank and row, and the
    lower bits in the intervals that `sample` suggests. A second pass counts those in intervals that it did not suggest.
    """
    result = [[0.0 if rank > count else inf] * rows for rank in ranks]
    places = [(place, row) for place, rank in enumerate(ranks) if 0 < rank <= count for row in range(rows)]
    if not places:
        return tuple(map(tuple, result))
    shares = {(place, row): ranks[place] / count for place, row in places}
    first = _suggested(sample, shares, rows=rows)
    upper = np.zeros((rows, 1 << _UPPER), np.int64)
    lower = {pair: np.zeros(_NEAR << _LOWER, np.int64) for pair in places}
    for block in stream():
        for row, bits in enumerate(map(_bits, block)):
            upper[row] += np.bincount(bits >> _LOWER, minlength=1 << _UPPER)
            _count_lower(lower, bits, row, first)
    interval = {(place, row): _locate(upper[row], ranks[place]) for place, row in places}
    missed = {pair: index for pair, (index, _) in interval.items() if not 0 <= index - first.get(pair, inf) < _NEAR}
    for pair in missed:
        lower[pair][:] = 0
    for block in stream() if missed else ():
        for row, bits in enumerate(map(_bits, block)):
            _count_lower(lower, bits, row, missed)
    first |= missed
    for place, row in places:
        above, rank = interval[place, row]
        start = (above - first[place, row]) << _LOWER
        low, _ = _locate(lower[place, row][start : start + (1 << _LOWER)], rank)
        result[place][row] = float(np.array((above << _LOWER) + low, np.int32).view(np.float32))
    return tuple(map(tuple, result))


def _suggested(
    sample: Iterable[tuple[Site, torch.Tensor]], shares: Mapping[_Pair, float], *, rows: int
) -> dict[_Pair, int]:
    """The first of `_NEAR` intervals around the quantile of a sample, per rank and row; nothing without a sample."""
    counts = np.zeros((rows, 1 << _UPPER))
    for site, values in sample:
        elements = min(prod(site.shape), STRIDE) * rows / values.numel()  # of the tensor, per sampled one
        for row, bits in enumerate(map(_bits, values)):
            counts[row] += elements * np.bincount(bits >> _LOWER, minlength=1 << _UPPER)
    if not counts.any():
        return {}
    return {
        (place, row): max(_locate(counts[row], share * counts[row].sum())[0] - 1, 0)
        for (place, row), share in shares.items()
    }


def _count_lower(counts: Mapping[_Pair, _Counts], bits: _Bits, row: int, first: Mapping[_Pair, int]) -> None:
    """Count the bits of a row in the intervals from `first` on."""
    for pair, index in first.items():
        if pair[1] == row:
            # As numbers without a sign, bits below the first interval are large: one comparison does for both ends.
            offset = (bits - np.int32(index << _LOWER)).view(np.uint32)
            counts[pair][:] += np.bincount(offset[offset < _NEAR << _LOWER], minlength=_NEAR << _LOWER)


def _locate(counts: np.ndarray[tuple[int], Any], rank: float) -> tuple[int, int]:
    """Return the bin of the rank-th largest entry, and its rank within that bin."""
    from_top = np.cumsum(counts[::-1])
    place = int(np.searchsorted(from_top, rank))
    index = len(counts) - 1 - place
    return index, int(rank - (from_top[place] - counts[index]))


def _bits(values: torch.Tensor) -> _Bits:
    """Bits of |values| as int32, which sort like the values."""
    return values.detach().abs().reshape(-1).view(torch.int32).cpu().numpy()
