"""The exact k-th largest magnitude, of a tensor in memory or of a stream that is never held.

Magnitudes of float32 numbers compare like their bits read as integers, so the k-th largest of a stream is
found by counting bits in bins over a bracket that shrinks until it is one number wide. A guess of the bracket
from a sample makes that one pass over the stream; a guess that proves wrong costs passes, never exactness.
Memory: one table of counts an expert, as long as the bracket is wide and at most 16 MiB.

Equal magnitudes: every entry that is at least as large as the k-th survives, so ties at the threshold are
kept, all of them, whatever the order of the elements (bfloat16 checkpoints have many).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

_Bits = np.ndarray[tuple[int], np.dtype[np.int32]]
_Counts = np.ndarray[tuple[int], np.dtype[np.int64]]

_BINS = 1 << 21
_TOP = 1 << 31  # above the bits of infinity and NaN
_MARGIN = 0.01  # how far off, as a share of all elements, a quantile guessed from a sample may be
_SAMPLE = 1 << 20  # elements of a sample that are worth looking at, each row
_SMALL = 1 << 16  # below this many elements nothing beats a plain partition
_STRIDED = 1 << 14  # elements taken from a tensor in memory to guess its quantile


def kth_largest(values: torch.Tensor, k: int) -> float:
    """The k-th largest |value| (k from 1) of a float32 tensor; infinity for k = 0, 0 beyond the count."""
    if k <= 0:
        return float("inf")
    if k > values.numel():
        return 0.0
    bits = _bits(values)
    place = len(bits) - k
    if len(bits) > _SMALL:
        # Partition only what lies near the quantile of every n-th element: ten times faster than all of them.
        low, high = _around(bits[:: len(bits) // _STRIDED], place / len(bits), 2 * _MARGIN)
        below = int(np.count_nonzero(bits < low))
        inside = _between(bits, low, high)
        if below <= place < below + len(inside):
            bits, place = inside.view(np.int32) + np.int32(low), place - below
    return _number(int(np.partition(bits, place)[place]))


@dataclass
class _Bracket:
    """The bits sought lie in [low, high); as long as it is not `sure`, that is a guess."""

    rank: int
    low: int = 0
    high: int = _TOP
    sure: bool = True

    @property
    def width(self) -> int:
        return -(-(self.high - self.low) // _BINS)

    @property
    def bins(self) -> int:
        return -(-(self.high - self.low) // self.width)

    @property
    def found(self) -> bool:
        return self.sure and self.high - self.low <= 1


def kth_largest_streamed(
    stream: Callable[[], Iterator[torch.Tensor]],
    ranks: Iterable[int],
    *,
    sample: Iterable[torch.Tensor] = (),
    count: int,
) -> tuple[float, ...]:
    """The ranks[t]-th largest magnitude of row t over the blocks [T, ...] of `stream()`: `count` columns.

    Rank 0 gives infinity (keep nothing); a rank beyond `count` gives 0 (keep everything).
    """
    wanted = list(ranks)
    brackets = {row: _Bracket(rank) for row, rank in enumerate(wanted) if 0 < rank <= count}
    if brackets:
        _guess(brackets, sample, count)
    while sought := {row: bracket for row, bracket in brackets.items() if not bracket.found}:
        _narrow(sought, stream())
    limits = {row: _number(bracket.low) for row, bracket in brackets.items()}
    return tuple(limits.get(row, float("inf") if rank <= 0 else 0.0) for row, rank in enumerate(wanted))


def _guess(brackets: dict[int, _Bracket], sample: Iterable[torch.Tensor], count: int) -> None:
    """Start each bracket around the quantile of a sample."""
    runs: list[torch.Tensor] = []
    held, step = 0, 1  # the sample of a large model is itself large: keep every step-th element
    for run in sample:
        runs.append(run[:, ::step].clone())
        held += runs[-1].shape[1]
        if held > _SAMPLE:
            runs = [torch.cat(runs, dim=1)[:, ::2].clone()]
            held, step = runs[0].shape[1], 2 * step
    if not held:
        return
    rows = torch.cat(runs, dim=1)
    for row, bracket in brackets.items():
        bracket.low, bracket.high = _around(_bits(rows[row]), 1 - bracket.rank / count, _MARGIN)
        bracket.sure = False


def _around(sample: _Bits, share: float, margin: float) -> tuple[int, int]:
    """Bits [low, high) between which the quantile `share` lies, if the sample is a fair one."""
    low, high = int((share - margin) * len(sample)), int((share + margin) * len(sample))
    places = [place for place in (low, high) if 0 < place < len(sample)]
    parted = np.partition(sample, places) if places else sample
    return (int(parted[low]) if low > 0 else 0, int(parted[high]) + 1 if high < len(sample) else _TOP)


def _narrow(brackets: dict[int, _Bracket], blocks: Iterator[torch.Tensor]) -> None:
    """One pass: count the bits inside each bracket, then shrink it to the bin that holds the rank."""
    counts: dict[int, _Counts] = {row: np.zeros(bracket.bins, np.int64) for row, bracket in brackets.items()}
    above = dict.fromkeys(brackets, 0)
    for block in blocks:
        for row, bracket in brackets.items():
            bits = _bits(block[row])
            above[row] += int(np.count_nonzero(bits >= bracket.high))
            inside = _between(bits, bracket.low, bracket.high)
            if bracket.width > 1:
                inside //= bracket.width
            np.add.at(counts[row], inside, 1)
    for row, bracket in brackets.items():
        _shrink(bracket, counts[row], above[row])


def _shrink(bracket: _Bracket, counts: _Counts, above: int) -> None:
    bracket.sure = True
    if above >= bracket.rank:  # the guess was too low: everything sought lies over it
        bracket.low, bracket.high = bracket.high, _TOP
        return
    reach = above + np.cumsum(counts[::-1])
    if reach[-1] < bracket.rank:  # the guess was too high
        bracket.low, bracket.high = 0, bracket.low
        return
    place = len(counts) - 1 - int(np.searchsorted(reach, bracket.rank))
    low, width = bracket.low + place * bracket.width, bracket.width
    bracket.low, bracket.high = low, min(low + width, bracket.high)


def _between(bits: _Bits, low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """What lies in [low, high), less low. Without a sign what lies under `low` is large: one comparison."""
    shifted = (bits - np.int32(low)).view(np.uint32)
    return np.compress(shifted < np.uint32(high - low), shifted)


def _bits(values: torch.Tensor) -> _Bits:
    """|values| as integers that sort alike; int32 is wide enough, since the sign bit is clear."""
    return values.detach().abs().reshape(-1).view(torch.int32).numpy()


def _number(bits: int) -> float:
    return float(np.array([bits], dtype=np.int32).view(np.float32)[0])
