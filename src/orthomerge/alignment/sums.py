"""Sums over pairs of features, in folds: all that an aligner in closed form needs of any number of inputs.

Row i belongs to fold i modulo `FOLDS`, whoever adds it up: batches may come in any size, and workers add what they
have. The sums of a fold's complement are sums too, so cross-validation needs no second look at the inputs.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert; Q [d, r] some directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

from orthomerge.alignment.gram import mirror, strips
from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.features.statistics import Moments

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    import torch

__all__ = ["FOLDS", "Sums", "moments_of"]

FOLDS = 5

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Sums:
    """`folds`: the moments of each fold's H and T, both as the head reads them; `task` is for messages.

    Where somebody has H and T of all inputs, `rows` are given in their place: then only those moments are made that an
    aligner asks for, and few directions of the rows cost less than the same of their moments.
    """

    folds: tuple[Moments, ...] | None
    task: str
    rows: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, H: torch.Tensor, T: torch.Tensor, task: str) -> Sums:
        """The sums of all inputs of a task."""
        return cls(None, task, (H, T))

    @classmethod
    def zero(cls, d: int, task: str) -> Sums:
        """The sums of no inputs."""
        return cls((Moments.zero(d, d),) * FOLDS, task)

    def add(self, H: torch.Tensor, T: torch.Tensor, *, first: int) -> Sums:
        """With some more rows; `first` is the number of the first of them among all inputs of the task."""
        added = [moments_of(pair) for pair in _in_folds(H, T)]
        return Sums(tuple(part + added[(fold - first) % FOLDS] for fold, part in enumerate(self.parts)), self.task)

    def __add__(self, other: Sums) -> Sums:
        """The sums of two workers, who have seen different inputs of one task."""
        if self.task != other.task:
            raise IncompatibleError(f"sums of {self.task!r} and of {other.task!r} cannot be added")
        return Sums(tuple(one + two for one, two in zip(self.parts, other.parts, strict=True)), self.task)

    @property
    def n(self) -> int:
        return len(self.rows[0]) if self.rows else sum(part.n for part in self.parts)

    @cached_property
    def parts(self) -> tuple[Moments, ...]:
        """The moments of each fold."""
        if self.folds is not None:
            return self.folds
        return tuple(moments_of(pair) for pair in _in_folds(*self.rows)) if self.rows else ()

    @cached_property
    def total(self) -> Moments:
        """Over all inputs, of which there must be one."""
        if not self.n:
            raise RecipeError(f"an aligner needs at least one input of {self.task!r}, got 0")
        # To the last bit what the folds add up to: where few inputs leave much open, it shows.
        return moments_of(*_in_folds(*self.rows)) if self.rows else self._sum(self.parts)

    def splits(self) -> Iterator[tuple[Moments, Moments]]:
        """For every fold that has inputs and leaves some: the sums of all others, and its own."""
        for number, part in enumerate(self.parts):
            if 0 < part.n < self.n:
                yield self._sum(self.parts[:number] + self.parts[number + 1 :]), part

    def seen_through(self, Q: torch.Tensor) -> Sums:
        """The sums of H Q and T Q, to six digits or so, which is enough to choose by."""
        if self.rows:
            H, T = (rows.float() @ Q.float() for rows in self.rows)
            return Sums.of(H, T, self.task)
        return Sums(tuple(part.seen_through(Q) for part in self.parts), self.task)

    def once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` gives: made by the first aligner that asks for it, and kept for all others with these sums."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast("Found", self._kept[key])

    @cached_property
    def _kept(self) -> dict[Hashable, object]:
        return {}

    def _sum(self, parts: tuple[Moments, ...]) -> Moments:
        first, *rest = parts
        return sum(rest, start=first)


def moments_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Moments:
    """The sum of `Moments.of` every H and T, for less.

    C is symmetric; sums that are finite were made of rows that are; and a strip is added while it is at hand.
    """
    import torch

    d, e = (rows.shape[1] for rows in pairs[0])
    zero = Moments.zero(d, e)
    n, sum_h, sum_t, C, S, tt = 0, zero.sum_h, zero.sum_t, zero.C, zero.S, zero.tt
    for H, T in pairs:
        if len(H) != len(T):
            return Moments.of(H, T)  # which says what is wrong
        h, t = (rows.detach().to("cpu", torch.float64) for rows in (H, T))
        n, sum_h, sum_t, tt = n + len(h), sum_h + h.sum(0), sum_t + t.sum(0), tt + t.square().sum()
        for rows, columns in strips(d):
            C[rows, columns] += h[:, rows].T @ h[:, columns]
        for rows, _ in strips(e):
            S[rows] += t[:, rows].T @ h
    if not math.isfinite(float(C.trace() + tt)):
        return sum((Moments.of(H, T) for H, T in pairs), start=zero)  # the same
    return Moments(n, sum_h, sum_t, mirror(C), S, tt)


def _in_folds(H: torch.Tensor, T: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of every fold, if the first of all is input 0."""
    return [(H[number::FOLDS], T[number::FOLDS]) for number in range(FOLDS)]
