"""Bringing the names of other writers to those of stock transformers, without reading a byte."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError, IncompatibleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from orthomerge.files.checkpoint import Checkpoint


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

# transformers 5 renamed the modules but still saves the old names; a bare `state_dict()` has the new ones.
_ATTENTION = [
    (r"(?<=\.)attention\.q_proj\.", "attention.attention.query."),
    (r"(?<=\.)attention\.k_proj\.", "attention.attention.key."),
    (r"(?<=\.)attention\.v_proj\.", "attention.attention.value."),
    (r"(?<=\.)attention\.o_proj\.", "attention.output.dense."),
]
dinov2_names = substitution(_ATTENTION)
vit_names = substitution(
    [
        (r"^((?:.*\.)?)layers\.(\d+)\.", r"\1encoder.layer.\2."),
        *_ATTENTION,
        (r"(?<=\.)mlp\.fc1\.", "intermediate.dense."),
        (r"(?<=\.)mlp\.fc2\.", "output.dense."),
    ]
)


def deberta_names(checkpoint: Checkpoint) -> Checkpoint:
    """Modern names; refuses an activation that DeBERTa's head does not have here.

    It is the one family whose config chooses the head's activation; all published models have GELU.
    """
    activation = (checkpoint.config or {}).get("pooler_hidden_act", "gelu")
    if activation != "gelu":
        raise IncompatibleError(
            f"{checkpoint.path}: 'pooler_hidden_act' in a DeBERTa-v2 config must be 'gelu', got {activation!r}; "
            "name the head's layers and activation in the recipe"
        )
    return modern_layer_norm(checkpoint)
