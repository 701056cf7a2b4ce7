"""Ways of reading features [B, d] off an encoder's output, and of running an encoder where a plain call is not enough.

A pooling is a pure function of the output, the batch that was run and the encoder's config (None if it has none).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from orthomerge.models.family import Pooling

    Batch = Mapping[str, torch.Tensor]


def cls(output: Any, batch: Batch, config: Any) -> torch.Tensor:
    """The last hidden state at the first token."""
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[:, 0]


def mean(output: Any, batch: Batch, config: Any) -> torch.Tensor:
    """The mean of the last hidden states over the attention mask, so that padding does not count."""
    if "attention_mask" not in batch:
        raise RecipeError(
            "pooling 'mean' needs an 'attention_mask' in every batch, or it would average over padding; "
            f"got {', '.join(sorted(batch)) or 'nothing'}: let the tokenizer return the mask"
        )
    hidden: torch.Tensor = output.last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    # Summed in float32: half precision overflows or rounds on long texts.
    return ((hidden.float() * mask).sum(1) / mask.sum(1)).to(hidden.dtype)


def pooler(output: Any, batch: Batch, config: Any) -> torch.Tensor:
    """The encoder's own pooled output: a dense layer and tanh over the first token."""
    pooled: torch.Tensor | None = output.pooler_output
    if pooled is None:
        raise RecipeError("pooling 'pooler' needs an encoder with a pooler, and this one has none; use 'cls' or 'mean'")
    return pooled


def projection(output: Any, batch: Batch, config: Any) -> torch.Tensor:
    """CLIP's projected image features."""
    features: torch.Tensor = output.image_embeds
    return features


def patches(first: int) -> Pooling:
    """The mean of an image's patch tokens, which start at `first` (after [CLS] and its like)."""

    def patch_mean(output: Any, batch: Batch, config: Any) -> torch.Tensor:
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[:, first:].mean(1)

    return patch_mean


def cls_mean(output: Any, batch: Batch, config: Any) -> torch.Tensor:
    """DINOv2's features [B, 2d]: the first token, and the mean of the patch tokens."""
    import torch

    hidden: torch.Tensor = output.last_hidden_state
    return torch.cat([hidden[:, 0], hidden[:, 1:].mean(1)], dim=1)


def eos(output: Any, batch: Batch, config: Any) -> torch.Tensor:
    """T5's last hidden state of the decoder at each text's last end-of-sequence token."""
    import torch

    end = _special_token(config, "eos_token_id")
    ids = batch["input_ids"]
    ends = ids == end
    if not bool(ends.any(1).all()):
        raise RecipeError(
            f"T5 features are read at the end-of-sequence token {end}, but some texts "
            "have none; let T5's own tokenizer add it"
        )
    hidden: torch.Tensor = output.last_hidden_state
    last = (ends * torch.arange(ids.shape[1], device=ids.device)).argmax(1)
    return hidden[torch.arange(len(ids), device=ids.device), last]


def shifted_decoder(encoder: Callable[..., Any], batch: Batch) -> Any:
    """T5's output when its decoder reads the input itself, shifted by one."""
    import torch

    start, ids = _special_token(getattr(encoder, "config", None), "decoder_start_token_id"), batch["input_ids"]
    shifted = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
    return encoder(**{"decoder_input_ids": shifted, "use_cache": False, **batch})


def _special_token(config: Any, name: str) -> int:
    token: int | None = getattr(config, name, None)
    if token is None:
        raise RecipeError(
            f"T5 features need to know {name!r}: set it in the encoder's config, and give a function of parameters "
            "that `config` as attribute"
        )
    return token
