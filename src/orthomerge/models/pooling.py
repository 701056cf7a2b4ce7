"""Ways of reading features [B, d] off an encoder's output, shared by the families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orthomerge.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from orthomerge.models.family import Features

__all__ = ["cls", "mean", "patches", "pooler"]


def cls(encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The last hidden state at the first token."""
    hidden: torch.Tensor = encoder(**batch).last_hidden_state
    return hidden[:, 0]


def mean(encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the last hidden states over the attention mask, so that padding does not count."""
    if "attention_mask" not in batch:
        raise RecipeError(
            "pooling 'mean' needs an 'attention_mask' in every batch, or it would average over padding; "
            f"got {', '.join(sorted(batch)) or 'nothing'}: let the tokenizer return the mask"
        )
    hidden: torch.Tensor = encoder(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    # Summed in float32: half precision overflows or rounds on long texts.
    return ((hidden.float() * mask).sum(1) / mask.sum(1)).to(hidden.dtype)


def pooler(encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The encoder's own pooled output: a dense layer and tanh over the first token."""
    pooled: torch.Tensor | None = encoder(**batch).pooler_output
    if pooled is None:
        raise RecipeError("pooling 'pooler' needs an encoder with a pooler, and this one has none; use 'cls' or 'mean'")
    return pooled


def patches(first: int) -> Features:
    """The mean of an image's patch tokens, which start at `first` (after [CLS] and its like)."""

    def patch_mean(encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden: torch.Tensor = encoder(**batch).last_hidden_state
        return hidden[:, first:].mean(1)

    return patch_mean
