"""Sums over pairs of features, in folds: all that an aligner in closed form needs of any number of inputs.

Row i belongs to fold i modulo `FOLDS`, whoever adds it up: batches may come in any size, and workers add what they
have. The sums of a fold's complement are sums too, so cross-validation needs no second look at the inputs.

Letters: H, T [n, d] what the head reads of the merged encoder and of the expert; Q [d, r] some directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

from orthomerge.alignment.gram import gram
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
        added = (moments_of(*_fold(H, T, (number - first) % FOLDS)) for number in range(FOLDS))
        return Sums(tuple(part + more for part, more in zip(self.parts, added, strict=True)), self.task)

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
        return tuple(moments_of(*_fold(*self.rows, number)) for number in range(FOLDS)) if self.rows else ()

    @cached_property
    def total(self) -> Moments:
        """Over all inputs, of which there must be one."""
        if not self.n:
            raise RecipeError(f"an aligner needs at least one input of {self.task!r}, got 0")
        # Fold by fold, as workers do: where few inputs leave much open, rounding shows.
        return _summed(*self.rows) if self.rows else self._sum(self.parts)

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


def moments_of(H: torch.Tensor, T: torch.Tensor, *, rooms: tuple[torch.Tensor, torch.Tensor] | None = None) -> Moments:
    """`Moments.of`, for less: C is symmetric, and sums that are finite were made of rows that are.

    `rooms`: for C and S, where they need not last.
    """
    import torch

    if len(H) == len(T):
        h, t = (rows.detach().to("cpu", torch.float64) for rows in (H, T))
        C, S = (None, None) if rooms is None else rooms
        C, S = gram(h, out=C), torch.mm(t.T, h, out=S)
        found = Moments(len(h), h.sum(0), t.sum(0), C, S, torch.linalg.vector_norm(t).square())
        if math.isfinite(float(found.C.trace() + found.tt)):
            return found
    return Moments.of(H, T)  # which says what is wrong


def _fold(H: torch.Tensor, T: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a fold, if the first of all is input 0."""
    return H[number::FOLDS], T[number::FOLDS]


def _summed(H: torch.Tensor, T: torch.Tensor) -> Moments:
    """What the moments of the folds would add up to, to the last bit, without room for more than one of them."""
    total = moments_of(*_fold(H, T, 0))
    rooms = (total.C.new_empty(total.C.shape), total.S.new_empty(total.S.shape))
    for number in range(1, FOLDS):
        part = moments_of(*_fold(H, T, number), rooms=rooms)
        for name in ("sum_h", "sum_t", "C", "S", "tt"):
            getattr(total, name).add_(getattr(part, name))  # nobody else has seen it yet
    return replace(total, n=len(H))
