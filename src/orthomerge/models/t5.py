"""T5 as a classifier: the decoder's state at the last end-of-sequence token goes into a head of two layers.

Raffel et al. 2020, arXiv 1910.10683; the classifier follows BART (Lewis et al. 2020): the decoder reads the
input itself, shifted by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orthomerge.errors import RecipeError
from orthomerge.models.family import Family, HeadLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["FAMILY", "UNUSED_BIAS", "eos"]

# In the files of the first T5 models, and read by no later code.
UNUSED_BIAS = "*decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def eos(encoder: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The decoder's last hidden state at each text's last end-of-sequence token."""
    import torch

    config = getattr(encoder, "config", None)
    if config is None or config.eos_token_id is None or config.decoder_start_token_id is None:
        raise RecipeError(
            "T5 features need to know 'eos_token_id' and 'decoder_start_token_id': "
            "set both in the encoder's config, and give a function of parameters that `config` as attribute"
        )
    ids = batch["input_ids"]
    ends = ids == config.eos_token_id
    if not bool(ends.any(1).all()):
        raise RecipeError(
            f"T5 features are read at the end-of-sequence token {config.eos_token_id}, but some texts "
            "have none; let T5's own tokenizer add it"
        )
    shifted = torch.cat([torch.full_like(ids[:, :1], config.decoder_start_token_id), ids[:, :-1]], dim=1)
    hidden: torch.Tensor = encoder(**{"decoder_input_ids": shifted, "use_cache": False, **batch}).last_hidden_state
    last = (ends * torch.arange(ids.shape[1], device=ids.device)).argmax(1)
    return hidden[torch.arange(len(ids), device=ids.device), last]


FAMILY = Family(
    name="t5",
    title="T5, encoder and decoder",
    model_types=("t5",),
    modality="text",
    encoder_class="T5Model",
    prefix="transformer.",
    head=HeadLayout(("classification_head.dense", "classification_head.out_proj"), "tanh"),
    poolings={"eos": eos},
    architecture="T5ForSequenceClassification",
    # `lm_head` is tied to `shared` in T5 1.0 but not in 1.1 and Flan: it is left out, not taken for a twin.
    foreign=("lm_head.*", UNUSED_BIAS),
    tied={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
)
