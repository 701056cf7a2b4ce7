"""Inputs that are opened only when they are looked at, and choosing some of them without looking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any


@dataclass(frozen=True)
class Lazy(Sequence[Any]):
    """A sequence whose item i is `load(keys[i])`, made anew every time it is asked for."""

    keys: Sequence[Any]
    load: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, place: Any) -> Any:
        return Lazy(self.keys[place], self.load) if isinstance(place, slice) else self.load(self.keys[place])


def pick(inputs: Sequence[Any], places: Iterable[int]) -> Sequence[Any]:
    """The inputs at some places, in that order; lazy ones stay lazy."""
    numbers = list(places)
    if isinstance(inputs, Lazy):
        return Lazy([inputs.keys[number] for number in numbers], inputs.load)
    if len(numbers) < 2:  # of which `itemgetter` makes no tuple
        return [inputs[number] for number in numbers]
    return itemgetter(*numbers)(inputs)  # type: ignore[no-any-return]
