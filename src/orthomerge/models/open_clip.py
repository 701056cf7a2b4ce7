"""CLIP vision towers under the names of open_clip and OpenAI, brought to those of transformers unread.

Cherti et al. 2023, arXiv 2212.07143 (open_clip); the papers on task vectors publish experts in this format.
Queries, keys and values are one fused matrix there, and the projection is stored the other way round.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError, some
from orthomerge.models.names import rename

if TYPE_CHECKING:
    from orthomerge.files.checkpoint import Checkpoint, Entry


_ANCHOR = "class_embedding"  # in the vision tower only
_FIRST = "transformer.resblocks.0.attn.in_proj_weight"
_BLOCK = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)")
_WHOLE = {
    "class_embedding": "vision_model.embeddings.class_embedding",
    "positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "ln_pre.weight": "vision_model.pre_layrnorm.weight",  # spelt so in transformers
    "ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "ln_post.weight": "vision_model.post_layernorm.weight",
    "ln_post.bias": "vision_model.post_layernorm.bias",
}
_LAYERS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
# Beside the vision tower: the text tower, and the numbers that OpenAI's archives carry along.
_TEXT = re.compile(
    r"(.*\.)?(transformer\.resblocks\..+|token_embedding\.weight|positional_embedding|ln_final\.(weight|bias)"
    r"|text_projection|logit_scale|logit_bias|attn_mask|input_resolution|context_length|vocab_size)"
)

# What `CLIPVisionModel` of transformers 5 saves bare; all others put `vision_model.` before it.
_BARE = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")


def vision_names(checkpoint: Checkpoint) -> Checkpoint:
    """Every writer's names of a CLIP's vision tower to those of `CLIPVisionModelWithProjection`."""
    if is_open_clip(checkpoint):
        return to_transformers(checkpoint)
    return rename(checkpoint, lambda name: f"vision_model.{name}" if name.startswith(_BARE) else name)


def is_open_clip(checkpoint: Checkpoint) -> bool:
    """Whether a vision tower under open_clip's names is in there."""
    return bool(_towers(checkpoint))


def to_transformers(checkpoint: Checkpoint) -> Checkpoint:
    """The vision tower as `CLIPVisionModelWithProjection` names it.

    Text-side tensors are dropped; what is neither vision nor text keeps its name, for others to refuse.
    """
    towers = _towers(checkpoint)
    if len(towers) != 1:
        what = f"several, under {some(towers)}" if towers else f"none ('*{_ANCHOR}' beside '*{_FIRST}')"
        raise CheckpointError(f"{checkpoint.path} must hold one open_clip vision tower, got {what}")
    (prefix,) = towers
    entries: dict[str, Entry] = {}
    unknown: list[str] = []
    for key, entry in checkpoint.entries.items():
        if key.startswith(prefix):
            converted = _convert(key.removeprefix(prefix), entry)
            entries |= converted
            if not converted:
                unknown.append(key)
        elif not _TEXT.fullmatch(key):
            entries[key] = entry
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path} is not a plain CLIP vision transformer: transformers' CLIP has no place for "
            f"{some(unknown)}"
        )
    return replace(checkpoint, entries=entries, aliases={})


def _towers(checkpoint: Checkpoint) -> list[str]:
    prefixes = [key.removesuffix(_ANCHOR) for key in checkpoint.entries if key.endswith(_ANCHOR)]
    return [prefix for prefix in prefixes if prefix + _FIRST in checkpoint.entries]


def _convert(name: str, entry: Entry) -> dict[str, Entry]:
    """One tensor under its new name, or three; none if it is not known."""
    if name in _WHOLE:
        return {_WHOLE[name]: entry}
    if name == "proj":
        return {"visual_projection.weight": entry.transposed()}
    block = _BLOCK.fullmatch(name)
    if block is None:
        return {}
    number, rest = block.groups()
    layer, _, part = rest.rpartition(".")
    home = f"vision_model.encoder.layers.{number}."
    if rest in ("attn.in_proj_weight", "attn.in_proj_bias") and entry.spec.shape[0] % 3 == 0:
        part, width = rest.removeprefix("attn.in_proj_"), entry.spec.shape[0] // 3
        return {
            f"{home}self_attn.{which}_proj.{part}": entry.rows(place * width, (place + 1) * width)
            for place, which in enumerate("qkv")
        }
    if layer in _LAYERS and part in ("weight", "bias"):
        return {f"{home}{_LAYERS[layer]}.{part}": entry}
    return {}
