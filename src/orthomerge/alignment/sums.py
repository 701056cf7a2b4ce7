"""Sums over pairs of features, in folds: all that an aligner in closed form needs of any number of inputs.

Row i belongs to fold i modulo `FOLDS`, whoever adds it up: batches may come in any size, and workers add what they
have. The sums of a fold's complement are sums too, so cross-validation needs no second look at the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.features.statistics import Moments

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    import torch

__all__ = ["FOLDS", "Sums"]

FOLDS = 5

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Sums:
    """`parts`: the moments of each fold's H and T, both as the head reads them; `task` is for messages."""

    parts: tuple[Moments, ...]
    task: str

    @classmethod
    def zero(cls, d: int, task: str) -> Sums:
        """The sums of no inputs."""
        return cls((Moments.zero(d, d),) * FOLDS, task)

    def add(self, H: torch.Tensor, T: torch.Tensor, *, first: int) -> Sums:
        """With some more rows; `first` is the number of the first of them among all inputs of the task."""
        parts = list(self.parts)
        for start in range(min(FOLDS, len(H))):
            fold = (first + start) % FOLDS
            parts[fold] = parts[fold].add(H[start::FOLDS], T[start::FOLDS])
        return Sums(tuple(parts), self.task)

    def __add__(self, other: Sums) -> Sums:
        """The sums of two workers, who have seen different inputs of one task."""
        if self.task != other.task:
            raise IncompatibleError(f"sums of {self.task!r} and of {other.task!r} cannot be added")
        return Sums(tuple(one + two for one, two in zip(self.parts, other.parts, strict=True)), self.task)

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @cached_property
    def total(self) -> Moments:
        """Over all inputs, of which there must be one."""
        if not self.n:
            raise RecipeError(f"an aligner needs at least one input of {self.task!r}, got 0")
        return self._sum(self.parts)

    def splits(self) -> Iterator[tuple[Moments, Moments]]:
        """For every fold that has inputs and leaves some: the sums of all others, and its own."""
        for number, part in enumerate(self.parts):
            if 0 < part.n < self.n:
                yield self._sum(self.parts[:number] + self.parts[number + 1 :]), part

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
