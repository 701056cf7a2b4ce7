"""How experts and their base are named and read: plain data, kept in every output so that nobody names them twice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from orthomerge.core.errors import RecipeError
from orthomerge.models.live import as_live

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
# Names of files and folders that an output has beside those of its tasks.
_RESERVED = ("readme.md", "orthomerge.json", "orthomerge.local.json")


@dataclass(frozen=True)
class HeadNames:
    """Where a head is, when it is not where its family keeps it; or of what a CLIP head is made.

    `layers`: names of the layers, first to last (`[fc]`, or `[head.dense, head.out]` with an `activation` between).
    `classes` and `templates`: a zero-shot head, through the base's text tower.
    """

    layers: tuple[str, ...] | None = None
    activation: Literal["tanh", "relu", "gelu"] | None = None
    classes: tuple[str, ...] | None = None
    templates: tuple[str, ...] = ("a photo of a {}.",)

    def __post_init__(self) -> None:
        count = 1 if self.layers is None else len(self.layers)
        if count not in (1, 2):
            raise RecipeError(f"a head has one or two 'layers', got {count}")
        if (count == 2) != (self.activation is not None):
            raise RecipeError("a head of two 'layers' has an 'activation' between them, and only such a head has one")


@dataclass(frozen=True)
class Expert:
    """One fine-tuned classifier: a folder, a file, an adapter or a hub id."""

    path: str
    prefix: str | None = None
    labels: tuple[str, ...] | None = None
    head: HeadNames | None = None

    def __post_init__(self) -> None:
        if self.labels == () or (self.head is not None and self.head.classes == ()):
            raise RecipeError(f"the expert {self.path} has an empty list of labels; name at least one, or leave it out")


@dataclass(frozen=True)
class Opening:
    """Base and experts as a user names them, and how each is read.

    `pooling`: how all heads read the encoder; None: as each expert says, else the family's default. `ignore`: patterns
    of tensors to leave out. `missing`: what to do where an expert lacks a tensor of the base.
    """

    experts: Mapping[str, Expert]
    base: str | None = None
    family: str | None = None
    encoder_prefix: str | None = None
    pooling: str | None = None
    ignore: tuple[str, ...] = field(default=())
    missing: Literal["error", "base"] = "error"
    check_base: bool = True

    def __post_init__(self) -> None:
        check_task_names(self.experts)


def reference(role: str, value: object) -> str:
    """What a user gave for a base or an expert, as text; a `Path` and a live model are never taken for a hub id."""
    if as_live(value) is not None:
        return f"<{role} in memory>"
    if isinstance(value, Path):
        return str(value) if value.is_absolute() or str(value).startswith("~") else f"./{value}"
    if isinstance(value, str):
        return value
    raise RecipeError(
        f"{role} must be a path, a hub id or a live model of transformers, got {type(value).__name__}; "
        "a merged model is opened from its folder"
    )


def check_task_names(tasks: Mapping[str, object]) -> None:
    """Names of tasks become names of folders."""
    if not tasks:
        raise RecipeError("'experts' is empty: name at least one")
    for task in tasks:
        if not _TASK.fullmatch(task):
            raise RecipeError(
                f"{task!r} cannot name an expert: use letters, digits and _ . + - (it becomes the name of a folder)"
            )
        if task.casefold() in _RESERVED:
            raise RecipeError(f"{task!r} cannot name an expert, because every output has a file of that name")
    if len({task.casefold() for task in tasks}) < len(tasks):
        raise RecipeError("two experts have names that differ in case only, which not every file system can tell apart")
