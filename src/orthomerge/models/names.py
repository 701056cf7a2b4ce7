"""Bringing the names of other writers to those of stock transformers, without reading a byte."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from orthomerge.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from orthomerge.checkpoints.checkpoint import Checkpoint

__all__ = ["modern_layer_norm", "rename", "substitution"]


def rename(checkpoint: Checkpoint, new_name: Callable[[str], str]) -> Checkpoint:
    """The same tensors under new names; two that end up under one name are an error."""
    names = {key: new_name(key) for key in (*checkpoint.entries, *checkpoint.aliases)}
    if all(old == new for old, new in names.items()):
        return checkpoint
    taken: dict[str, str] = {}
    for old, new in names.items():
        if new in taken:
            raise CheckpointError(
                f"{checkpoint.path} holds both {taken[new]!r} and {old!r}, two names of {new!r}; "
                "remove the one that is left over from an earlier save"
            )
        taken[new] = old
    return replace(
        checkpoint,
        entries={names[key]: entry for key, entry in checkpoint.entries.items()},
        aliases={names[key]: names[target] for key, target in checkpoint.aliases.items()},
    )


def substitution(rules: Iterable[tuple[str, str]]) -> Callable[[Checkpoint], Checkpoint]:
    """An `adapt` that applies regular expressions to every name, in order."""
    compiled = [(re.compile(pattern), new) for pattern, new in rules]

    def new_name(name: str) -> str:
        for pattern, new in compiled:
            name = pattern.sub(new, name)
        return name

    return lambda checkpoint: rename(checkpoint, new_name)


# Checkpoints that were converted from TensorFlow (bert-base-uncased among them) keep its names.
modern_layer_norm = substitution(
    [(r"(?<=\bLayerNorm\.)gamma$", "weight"), (r"(?<=\bLayerNorm\.)beta$", "bias")],
)
