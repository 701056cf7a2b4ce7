"""What a source says before it is a task: inputs by split, labels as written, and where each was first seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orthomerge.core.errors import CheckpointError, OrthomergeError
from orthomerge.data.task import Modality, Split

Key = int | str  # a label as a source writes it: an id or a name

_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_MOST_SHOWN = 3
_WAY_OUT = "correct them, or take them out (empty texts are kept with `keep_empty`)"


def split_named(word: str) -> Split | None:
    """Return the split that a word stands for (`dev` and `validation` are val), or None."""
    return _SPLITS.get(word.strip().casefold())


def by_split(
    words: Iterable[str], where: object, *, error: type[OrthomergeError] = CheckpointError
) -> dict[Split, str]:
    """Return the word that stands for each split; other words are left out, two for one split are refused."""
    splits: dict[Split, str] = {}
    for word in words:
        split = split_named(word)
        if split in splits:
            raise error(f"{where}: {splits[split]!r} and {word!r} are both the {split} split; keep one of them")
        if split:
            splits[split] = word
    return splits


@dataclass(frozen=True)
class Part:
    """Inputs and labels of one split."""

    inputs: Any  # a sequence; a list while rows are added
    keys: list[Key]

    @property
    def labels(self) -> list[Key] | None:
        """The labels; None if any input lacks one."""
        return self.keys if len(self.keys) == len(self.inputs) else None


@dataclass
class Raw:
    """Data as stored. `names`: label names by key, if the source has them; `first`: where each label occurs first."""

    where: str
    modality: Modality
    parts: dict[Split, Part] = field(default_factory=dict)
    names: dict[Key, str] = field(default_factory=dict)
    first: dict[Key, str] = field(default_factory=dict)

    def place(self, key: Key) -> str:
        """Return where a label occurs first."""
        return self.first.get(key, self.where)

    def add(self, split: Split, inputs: Sequence[Any], keys: list[Key], places: Iterable[str]) -> None:
        """Add a split; `places`: where the label of each input is written."""
        self.parts[split] = Part(inputs, keys)
        for key, place in zip(keys, places, strict=False):
            self.first.setdefault(key, place)


class Problems:
    """Problems with the rows of a source: the first three are listed, the others counted."""

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
