"""Bringing the names of other writers to those of stock transformers, without reading a byte.

CLIP vision towers also come under the names of open_clip and OpenAI (Cherti et al. 2023, arXiv 2212.07143; the papers
on task vectors publish experts in this format). Queries, keys and values are one fused matrix there, and the projection
is stored the other way round.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError, IncompatibleError, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
