"""Data in the form of its source, and the order of its labels: that of the source, or that of an expert's head."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError, nearest, some
from orthomerge.data.task import Modality, Split, Task

Key = int | str  # a label as a source writes it: an id or a name

_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_MAX_SHOWN = 3
_WAY_OUT = "correct or remove them (empty texts are kept with `keep_empty`)"


def split_named(name: str) -> Split | None:
    """Return the split that has a name (`dev` and `validation` are val), or None."""
    return _SPLITS.get(name.strip().casefold())


def by_split(names: Iterable[str], where: object) -> dict[Split, str]:
    """Return the name of each split among `names`; others are left out, and two names of one split are refused."""
    splits: dict[Split, str] = {}
    for name in names:
        split = split_named(name)
        if split in splits:
            raise CheckpointError(
                f"{where}: {splits[split]!r} and {name!r} are both the {split} split; keep one of them"
            )
        if split:
            splits[split] = name
    return splits


@dataclass(frozen=True)
class Part:
    """Inputs and labels of one split."""

    inputs: Any  # a sequence; a list while rows are added
    keys: list[Key]

    @property
    def labels(self) -> list[Key] | None:
        """Labels; None if any input has none."""
        return self.keys if len(self.keys) == len(self.inputs) else None


@dataclass
class Raw:
    """Data as stored. `names`: label names by key, if the source has them; `first`: where each label occurs first."""

    where: str
    modality: Modality
    parts: dict[Split, Part] = field(default_factory=dict)
    names: dict[Key, str] = field(default_factory=dict)
    first: dict[Key, str] = field(default_factory=dict)

    def location(self, key: Key) -> str:
        return self.first.get(key, self.where)

    def add(self, split: Split, inputs: Sequence[Any], keys: list[Key], locations: Iterable[str]) -> None:
        """Add a split; `locations` are those of the labels in the source, for messages."""
        self.parts[split] = Part(inputs, keys)
        for key, location in zip(keys, locations, strict=False):
            self.first.setdefault(key, location)


def check_rows(where: object, problems: Sequence[str]) -> None:
    """Raise an error if rows of a source have problems: the first three are listed, the others are counted."""
    if problems:
        rows = "1 bad row" if len(problems) == 1 else f"{len(problems)} bad rows"
        more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise CheckpointError(f"{where} has {rows}: {'; '.join(problems[:_MAX_SHOWN])}{more}; {_WAY_OUT}")


def match_labels(task: Task, labels: tuple[str, ...]) -> Task:
    """Match a task's labels by name to an expert's (`id2label`); for `LABEL_0`, ... only their number must agree."""
    if labels == tuple(f"LABEL_{index}" for index in range(len(labels))):
        if len(labels) != len(task.labels):
            raise IncompatibleError(
                f"the expert of task {task.name!r} has {len(labels)} labels without names, but the task has "
                f"{len(task.labels)}: {some(task.labels)}"
            )
        return task
    indices = _indices(task.labels, labels)
    missing = sorted(name for index, name in enumerate(labels) if index not in indices)
    unknown = [name for name, index in zip(task.labels, indices, strict=True) if index is None]
    if missing or unknown:
        differences = [f"only the task has {some(unknown)}"] * bool(unknown)
        differences += [f"only the expert has {some(missing)}"] * bool(missing)
        raise IncompatibleError(
            f"the labels of task {task.name!r} are not those of its expert: {'; '.join(differences)}; "
            "give the task the expert's names with `labels`, in the order of the task's ids"
        )
    order = np.array(indices, dtype=np.int64)
    splits = {
        split: part if part.labels is None else replace(part, labels=order[part.labels])
        for split, part in task.splits.items()
    }
    return replace(task, labels=labels, splits=splits)


def resolve(raw: Raw, wanted: tuple[str, ...] | None) -> tuple[tuple[str, ...], dict[Key, int]]:
    """Return the names of the labels in order, and the index of each label as the source writes it.

    Labels are in the order of the ids, or of the names if there are no ids; whole numbers are ids, also as text. With
    `wanted`, they are in that order: matched by name, or by position if the source has only ids.
    """
    keys = _in_order({*raw.names, *(key for part in raw.parts.values() for key in part.labels or ())}, raw)
    by_name: dict[str, Key] = {}
    for key in keys:
        name = raw.names.get(key, str(key))
        if raw.names and key not in raw.names:
            raise CheckpointError(
                f"{raw.first[key]}: label {key!r} has no name; the names are {some(raw.names.values())}"
            )
        if by_name.setdefault(name, key) != key:
            raise CheckpointError(f"{raw.where}: labels {by_name[name]!r} and {key!r} are both called {name!r}")
    if wanted is not None:
        if not wanted or len(set(wanted)) < len(wanted):
            raise RecipeError(f"'labels' must be distinct names, got {some(wanted) or 'none'}")
        return wanted, _as_wanted(raw, by_name, wanted)
    if not raw.names:
        _check_gaps(raw, keys)
    return tuple(by_name), {key: index for index, key in enumerate(keys)}


def _in_order(keys: set[Key], raw: Raw) -> list[Key]:
    if not keys:
        raise CheckpointError(f"{raw.where} has no labels at all")
    texts = [key for key in keys if isinstance(key, str)]
    if all(_NUMBER.fullmatch(text) for text in texts):
        return sorted(keys, key=int)
    if len(texts) < len(keys):
        text, number = min(texts), next(key for key in keys if not isinstance(key, str))
        raise CheckpointError(
            f"{raw.where} must have either ids or names as labels, got {text!r} ({raw.location(text)}) and {number!r} "
            f"({raw.location(number)})"
        )
    return sorted(keys, key=str)


def _as_wanted(raw: Raw, by_name: dict[str, Key], wanted: tuple[str, ...]) -> dict[Key, int]:
    indices = dict(zip(by_name, _indices(tuple(by_name), wanted), strict=True))
    matched = {by_name[name]: index for name, index in indices.items() if index is not None}
    if len(matched) == len(by_name):
        return matched
    ids = {} if raw.names else {key: int(key) for key in by_name.values() if _NUMBER.fullmatch(str(key))}
    positions = {key: number for key, number in ids.items() if 0 <= number < len(wanted)}
    if len(positions) == len(by_name):
        return positions
    unknown = [name for name, key in by_name.items() if key not in matched]
    bad = next((name for name in unknown if by_name[name] not in positions), unknown[0])
    raise CheckpointError(
        f"{raw.location(by_name[bad])}: label {bad!r} is not one of the {len(wanted)} labels; {nearest(bad, wanted)}"
    )


def _check_gaps(raw: Raw, keys: list[Key]) -> None:
    """Refuse gaps in ids without names: ids after a gap would be numbered differently."""
    if any(_NUMBER.fullmatch(str(key)) is None for key in keys):
        return
    numbers = [int(key) for key in keys]
    if numbers[0] < 0:
        raise CheckpointError(f"{raw.location(keys[0])}: label {numbers[0]} is negative; ids must run from 0 or from 1")
    missing = next((label for label, number in enumerate(numbers, int(numbers[0] == 1)) if label != number), None)
    if missing is not None:
        raise CheckpointError(
            f"{raw.where} has labels from {numbers[0]} to {numbers[-1]} but no {missing}; a class without examples "
            "must be named: give all names with `labels`, in the order of the ids"
        )


def _indices(names: Sequence[str], among: Sequence[str]) -> list[int | None]:
    """Return the index of each name in `among`, or None; case, spaces and underscores are ignored if necessary."""
    exact = {name: index for index, name in enumerate(among)}
    if not all(name in exact for name in names):
        loose = {_normalised(name): index for index, name in enumerate(among)}
        if len(loose) == len(among) and len({_normalised(name) for name in names}) == len(names):
            return [loose.get(_normalised(name)) for name in names]
    return [exact.get(name) for name in names]


def _normalised(name: str) -> str:
    return re.sub(r"[\s_]+", "", name).casefold()
