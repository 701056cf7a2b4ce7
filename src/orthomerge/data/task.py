"""Tasks (a name, ordered labels, splits of inputs), and random subsets of their examples.

The same seed always gives the same indices, which are sorted. With one seed, a larger subset contains the smaller ones,
so that scores with different numbers of shots are comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from orthomerge.core.errors import RecipeError, nearest, some

Split = Literal["train", "val", "test"]
Modality = Literal["text", "image"]
# Inputs that a method uses before it is scored: none; inputs that are not scored (train or val); the scored ones.
Access = Literal["data-free", "inductive", "transductive"]
Labels = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Lazy(Sequence[Any]):
    """A sequence whose item i is `load(keys[i])`, loaded again at every access."""

    keys: Sequence[Any]
    load: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> Any:
        return Lazy(self.keys[index], self.load) if isinstance(index, slice) else self.load(self.keys[index])


def pick(inputs: Sequence[Any], indices: Iterable[int]) -> Sequence[Any]:
    """Return the inputs at some indices, in that order; a `Lazy` sequence stays lazy."""
    if isinstance(inputs, Lazy):
        return Lazy([inputs.keys[index] for index in indices], inputs.load)
    return [inputs[index] for index in indices]


@dataclass(frozen=True)
class Examples:
    """Inputs of one split: texts, or images as uint8 arrays [H, W] or [H, W, 3]; labels index those of the task."""

    inputs: Sequence[Any]
    labels: Labels | None
    split: Split

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != len(self.inputs):
            raise RecipeError(f"the {self.split} split has {len(self.inputs)} inputs but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: Sequence[int] | Labels) -> Examples:
        labels = None if self.labels is None else self.labels[np.asarray(indices, dtype=np.int64)]
        return Examples(pick(self.inputs, map(int, indices)), labels, self.split)

    def unlabelled(self) -> Examples:
        """Return the inputs without labels, for code that must not see them."""
        return Examples(self.inputs, None, self.split)

    def digest(self) -> str:
        """Return the hash of the inputs, in order; labels are left out, because features do not depend on them."""
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
            ids = examples.labels
            if ids is not None and len(ids) and not 0 <= ids.min() <= ids.max() < len(self.labels):
                raise RecipeError(f"labels of the {split} split of {self.name!r} must be 0 to {len(self.labels) - 1}")

    def __getitem__(self, split: str) -> Examples:
        if split not in self.splits:
            raise RecipeError(f"task {self.name!r} has no {split!r} split; {nearest(split, self.splits)}")
        return self.splits[split]


def few_shot(labels: Labels, shots: int, *, seed: int, allow_fewer: bool = False) -> Labels:
    """Return indices of `shots` random examples per class. `allow_fewer`: take all of a class that has fewer."""
    if shots < 1:
        raise RecipeError(f"the number of shots must be at least 1, got {shots}")
    sizes = np.bincount(labels)
    short = np.flatnonzero(sizes < shots)
    if short.size and not allow_fewer:
        raise RecipeError(
            f"class {short[0]} has {sizes[short[0]]} examples, fewer than {shots} shots ({short.size} of {sizes.size} "
            f"classes have too few); ask for at most {sizes.min()}, or allow fewer"
        )
    return _draw(labels, np.minimum(sizes, shots), seed=seed)


def share(count: int, ratio: float, *, seed: int) -> Labels:
    """Return indices of a random share of `count` examples, at least one."""
    if count < 1 or not 0 < ratio <= 1:
        raise RecipeError(f"a share must be above 0 and at most 1 of at least one example, got {ratio} of {count}")
    return np.sort(_generator(seed).permutation(count)[: max(1, round(ratio * count))])


def stratified(labels: Labels, count: int, *, seed: int) -> Labels:
    """Return indices of at most `count` random examples, stratified; at least one per class is not chosen."""
    sizes = np.bincount(labels)
    quota = np.minimum(count * sizes // len(labels), np.maximum(sizes - 1, 0))
    for label in np.argsort(-(count * sizes % len(labels)), kind="stable"):  # the largest remainders first
        if quota.sum() < count and quota[label] < sizes[label] - 1:
            quota[label] += 1
    return _draw(labels, quota, seed=seed)


def _draw(labels: Labels, quota: Labels, *, seed: int) -> Labels:
    generator = _generator(seed)
    chosen = [generator.permutation(np.flatnonzero(labels == label))[:count] for label, count in enumerate(quota)]
    indices: Labels = np.sort(np.concatenate(chosen)).astype(np.int64)
    return indices


def _generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise RecipeError(f"a seed must not be negative, got {seed}")
    return np.random.Generator(np.random.PCG64(seed))
