"""A task: a name, its labels in order, and inputs in splits. Where data came from is part of its type."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from orthomerge.core.errors import RecipeError, nearest, some

Split = Literal["train", "val", "test"]
Modality = Literal["text", "image"]
# Which inputs a method saw before it was scored: none; some that are not scored (train or val); the scored inputs.
Access = Literal["data-free", "inductive", "transductive"]
Labels = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Lazy(Sequence[Any]):
    """A sequence whose item i is `load(keys[i])`, loaded again at every access."""

    keys: Sequence[Any]
    load: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, place: Any) -> Any:
        return Lazy(self.keys[place], self.load) if isinstance(place, slice) else self.load(self.keys[place])


def pick(inputs: Sequence[Any], places: Iterable[int]) -> Sequence[Any]:
    """The inputs at some places, in that order; lazy ones stay lazy."""
    if isinstance(inputs, Lazy):
        return Lazy([inputs.keys[place] for place in places], inputs.load)
    return [inputs[place] for place in places]


@dataclass(frozen=True)
class Examples:
    """Inputs of one split, in a fixed order: texts, or images as uint8 arrays [H, W] or [H, W, 3].

    `labels` are row numbers of the task's labels; None where there are none.
    """

    inputs: Sequence[Any]
    labels: Labels | None
    split: Split

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != len(self.inputs):
            raise RecipeError(f"the {self.split} split has {len(self.inputs)} inputs but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, places: Sequence[int] | Labels) -> Examples:
        """Some of the examples, in the order of `places`."""
        labels = None if self.labels is None else self.labels[np.asarray(places, dtype=np.int64)]
        return Examples(pick(self.inputs, map(int, places)), labels, self.split)

    def unlabelled(self) -> Examples:
        """The same inputs without labels, for everything that must not see them."""
        return Examples(self.inputs, None, self.split)

    def digest(self) -> str:
        """A hash of the inputs in their order; labels do not count, features do not depend on them."""
        sha = hashlib.sha256()
        for item in self.inputs:
            data = item.encode() if isinstance(item, str) else np.ascontiguousarray(item).tobytes()
            shape = "text" if isinstance(item, str) else str(np.asarray(item).shape)
            sha.update(f"{shape}:{len(data)}:".encode())
            sha.update(data)
        return sha.hexdigest()


@dataclass(frozen=True)
class Task:
    """A classification task. Every split's labels run from 0 to len(labels) - 1."""

    name: str
    labels: tuple[str, ...]
    modality: Modality
    splits: Mapping[str, Examples]

    def __post_init__(self) -> None:
        if len(set(self.labels)) < len(self.labels) or not self.labels:
            raise RecipeError(f"task {self.name!r} must have distinct labels, got {some(self.labels)}")
        for split, examples in self.splits.items():
            numbers = examples.labels
            if numbers is not None and len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.labels):
                raise RecipeError(f"the {split} split of {self.name!r} has labels outside 0..{len(self.labels) - 1}")

    def __getitem__(self, split: str) -> Examples:
        if split not in self.splits:
            raise RecipeError(f"task {self.name!r} has no {split!r} split; {nearest(split, self.splits)}")
        return self.splits[split]
