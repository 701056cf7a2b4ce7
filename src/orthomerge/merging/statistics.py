"""Gram matrices and k-th largest magnitudes of task vectors, in streamed passes.

Results do not depend on block sizes: sums are in float64 over runs of one length, and order statistics are exact.
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
_IN_MEMORY = 1 << 24  # elements of all rows up to which a stream is read into memory


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
    like their bits read as integers. A long stream takes one pass if the quantiles of `sample` are near its own: it
    counts the bits in an interval around them. Otherwise two are needed, for the upper and then for the lower bits.
    """
    result = [[0.0 if rank > count else inf] * rows for rank in ranks]
    wanted = {(place, row): rank for place, rank in enumerate(ranks) if 0 < rank <= count for row in range(rows)}
    bits = dict[_Pair, int]()
    if wanted and rows * count <= _IN_MEMORY:
        bits = _in_memory(stream, wanted, rows=rows, count=count)
    elif wanted:
        bits = _near_sample(stream, wanted, sample, rows=rows, count=count)
    if rest := {pair: rank for pair, rank in wanted.items() if pair not in bits}:
        bits |= _two_passes(stream, rest, rows=rows)
    for (place, row), value in bits.items():
        result[place][row] = float(np.array(value, np.int32).view(np.float32))
    return tuple(map(tuple, result))


def _in_memory(
    stream: Callable[[], Iterable[torch.Tensor]], wanted: Mapping[_Pair, int], *, rows: int, count: int
) -> dict[_Pair, int]:
    values = torch.cat([block.reshape(rows, -1).cpu() for block in stream()], 1)
    sorted_around = {
        row: np.partition(_bits(values[row]), sorted({count - wanted[pair] for pair in wanted if pair[1] == row}))
        for row in range(rows)
    }
    return {pair: int(sorted_around[pair[1]][count - rank]) for pair, rank in wanted.items()}


def _two_passes(
    stream: Callable[[], Iterable[torch.Tensor]], wanted: Mapping[_Pair, int], *, rows: int
) -> dict[_Pair, int]:
    upper = np.zeros((rows, 1 << _UPPER), np.int64)
    for block in stream():
        for row, bits in enumerate(map(_bits, block)):
            upper[row] += np.bincount(bits >> _LOWER, minlength=1 << _UPPER)
    interval = {pair: _locate(upper[pair[1]], rank) for pair, rank in wanted.items()}
    lower = {pair: np.zeros(1 << _LOWER, np.int64) for pair in wanted}
    for block in stream():
        for row, bits in enumerate(map(_bits, block)):
            for pair in (pair for pair in wanted if pair[1] == row):
                lower[pair] += _counts_from(bits, interval[pair][0], 1)
    return {pair: (above << _LOWER) + _locate(lower[pair], rank)[0] for pair, (above, rank) in interval.items()}


def _near_sample(
    stream: Callable[[], Iterable[torch.Tensor]],
    wanted: Mapping[_Pair, int],
    sample: Iterable[tuple[Site, torch.Tensor]],
    *,
    rows: int,
    count: int,
) -> dict[_Pair, int]:
    """Bits of those k-th largest magnitudes that lie near the quantiles of a sample, by rank and row."""
    sampled = np.zeros((rows, 1 << _UPPER))
    for site, values in sample:
        weight = min(prod(site.shape), STRIDE) * rows / values.numel()  # elements of the tensor per sampled element
        for row, bits in enumerate(map(_bits, values)):
            sampled[row] += weight * np.bincount(bits >> _LOWER, minlength=1 << _UPPER)
    if not sampled.any():
        return {}
    totals = sampled.sum(1)
    first = {
        (place, row): max(_locate(sampled[row], rank / count * totals[row])[0] - 1, 0)
        for (place, row), rank in wanted.items()
    }
    counts = {pair: np.zeros(_NEAR << _LOWER, np.int64) for pair in wanted}
    above = dict.fromkeys(wanted, 0)
    for block in stream():
        for row, bits in enumerate(map(_bits, block)):
            for pair in (pair for pair in wanted if pair[1] == row):
                counts[pair] += _counts_from(bits, first[pair], _NEAR)
                above[pair] += int(np.count_nonzero(bits >> _LOWER >= first[pair] + _NEAR))
    inside = {pair: rank - above[pair] for pair, rank in wanted.items()}
    return {
        pair: (first[pair] << _LOWER) + _locate(counts[pair], rank)[0]
        for pair, rank in inside.items()
        if 0 < rank <= counts[pair].sum()
    }


def _counts_from(bits: _Bits, first: int, number: int) -> _Counts:
    # As numbers without a sign, bits below the first interval are large: one comparison does for both ends.
    offset = (bits - np.int32(first << _LOWER)).view(np.uint32)
    counts: _Counts = np.bincount(offset[offset < number << _LOWER], minlength=number << _LOWER)
    return counts


def _locate(counts: np.ndarray[tuple[int], Any], rank: float) -> tuple[int, int]:
    """Return the bin of the rank-th largest entry, and its rank within that bin."""
    from_top = np.cumsum(counts[::-1])
    place = min(int(np.searchsorted(from_top, rank)), len(counts) - 1)  # sums of a sample's weights are rounded
    index = len(counts) - 1 - place
    return index, int(rank - (from_top[place] - counts[index]))


def _bits(values: torch.Tensor) -> _Bits:
    """Bits of |values| as int32, which sort like the values."""
    return values.detach().abs().reshape(-1).view(torch.int32).cpu().numpy()
