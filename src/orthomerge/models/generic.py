"""Any module whose recipe says where its encoder and its head are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.heads import Activation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


def generic(prefix: str, head_layers: Sequence[str] = (), activation: Activation | None = None) -> Family:
    """A module that keeps its encoder under `prefix` and its head in one or two linear layers."""
    layers = tuple(head_layers)
    if len(layers) > 2:
        raise RecipeError(f"a head has one or two layers, got {len(layers)}: {', '.join(layers)}")
    if activation is not None and activation not in get_args(Activation):
        raise RecipeError(f"unknown activation {activation!r}; {nearest(activation, get_args(Activation))}")
    if (len(layers) == 2) != (activation is not None):
        raise RecipeError(
            f"a head of two layers needs an activation between them, and only such a head has one; "
            f"got {len(layers)} layers and activation {activation or 'none'}"
        )
    return Family(
        name="generic",
        title="any module",
        model_types=(),
        modality="other",
        encoder_class="",
        prefix=prefix if not prefix or prefix.endswith(".") else f"{prefix}.",
        head=HeadLayout(layers, activation) if layers else None,
        poolings={"output": _output},
    )


def _output(output: Any, batch: Mapping[str, torch.Tensor], config: Any) -> torch.Tensor:
    import torch

    if not isinstance(output, torch.Tensor):
        raise RecipeError(f"a generic encoder must return its features as one tensor, got {type(output).__name__}")
    return output
