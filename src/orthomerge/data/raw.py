"""What a source says before it is a task: inputs by split, labels as written, and where each was first seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError

if TYPE_CHECKING:
    from orthomerge.data.task import Modality, Split


# A label as a source writes it: an id or a name.
Key = int | str

_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_MOST_SHOWN = 3
_WAY_OUT = "correct them, or take them out (empty texts are kept with `keep_empty`)"


def split_named(word: str) -> Split | None:
    """The split that a word stands for (`dev` and `validation` are val), or None."""
    return _SPLITS.get(word.strip().casefold())


@dataclass(frozen=True)
class Part:
    """One split; `keys` is None where it has no labels."""

    inputs: Sequence[Any]
    keys: Sequence[Key] | None


@dataclass(frozen=True)
class Raw:
    """A source as it is. `names`: what it calls its labels, if it says; `first`: where each label occurs first."""

    where: str
    modality: Modality
    parts: Mapping[Split, Part]
    names: Mapping[Key, str]
    first: Mapping[Key, str]


class Problems:
    """What is wrong with a source, row by row: three are told, the others counted."""

    def __init__(self, where: object) -> None:
        self.where = where
        self.shown: list[str] = []
        self.count = 0

    def add(self, problem: str) -> None:
        self.count += 1
        if len(self.shown) < _MOST_SHOWN:
            self.shown.append(problem)

    def check(self) -> None:
        """Raise if there are any."""
        if self.count:
            more = self.count - len(self.shown)
            rows = "1 bad row" if self.count == 1 else f"{self.count} bad rows"
            rest = f"; and {more} more" if more else ""
            raise CheckpointError(f"{self.where} has {rows}: {'; '.join(self.shown)}{rest}; {_WAY_OUT}")
