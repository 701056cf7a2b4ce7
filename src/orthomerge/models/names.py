"""Translation of tensor names of other formats to those of stock transformers; no tensor is read.

CLIP vision towers are also published with the names of open_clip and OpenAI (Cherti et al. 2023, arXiv 2212.07143;
the papers on task vectors). There, queries, keys and values are one fused matrix; the projection is transposed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from orthomerge.core.errors import CheckpointError, IncompatibleError, some
from orthomerge.files.checkpoint import Checkpoint, Entry

_Rules = list[tuple[str, str]]  # regular expressions and their replacements
# Checkpoints that were converted from TensorFlow (bert-base-uncased among them) keep its names.
_LAYER_NORM: _Rules = [(r"(?<=\bLayerNorm\.)gamma$", "weight"), (r"(?<=\bLayerNorm\.)beta$", "bias")]
# transformers 5 renamed the modules but still saves the old names; a bare `state_dict()` has the new ones.
_ATTENTION: _Rules = [
    (r"(?<=\.)attention\.q_proj\.", "attention.attention.query."),
    (r"(?<=\.)attention\.k_proj\.", "attention.attention.key."),
    (r"(?<=\.)attention\.v_proj\.", "attention.attention.value."),
    (r"(?<=\.)attention\.o_proj\.", "attention.output.dense."),
]
_VIT: _Rules = [
    (r"^((?:.*\.)?)layers\.(\d+)\.", r"\1encoder.layer.\2."),
    *_ATTENTION,
    (r"(?<=\.)mlp\.fc1\.", "intermediate.dense."),
    (r"(?<=\.)mlp\.fc2\.", "output.dense."),
]
# `CLIPVisionModel` of transformers 5 saves these without the prefix `vision_model.` of all other classes.
_UNPREFIXED: _Rules = [(r"^(?=(embeddings|encoder|pre_layrnorm|post_layernorm)\.)", "vision_model.")]
_LAYER = r"^transformer\.resblocks\.(\d+)\."
_OPEN_CLIP: _Rules = [
    (r"^class_embedding$", "embeddings.class_embedding"),
    (r"^positional_embedding$", "embeddings.position_embedding.weight"),
    (r"^conv1\.weight$", "embeddings.patch_embedding.weight"),
    (r"^ln_pre\.(weight|bias)$", r"pre_layrnorm.\1"),  # spelt so in transformers
    (r"^ln_post\.(weight|bias)$", r"post_layernorm.\1"),
    (_LAYER + r"ln_([12])\.(weight|bias)$", r"encoder.layers.\1.layer_norm\2.\3"),
    (_LAYER + r"attn\.out_proj\.(weight|bias)$", r"encoder.layers.\1.self_attn.out_proj.\2"),
    (_LAYER + r"mlp\.c_fc\.(weight|bias)$", r"encoder.layers.\1.mlp.fc1.\2"),
    (_LAYER + r"mlp\.c_proj\.(weight|bias)$", r"encoder.layers.\1.mlp.fc2.\2"),
]
_FUSED = re.compile(_LAYER + r"attn\.in_proj_(weight|bias)")
_ANCHOR = "class_embedding"  # in the vision tower only
_FIRST = "transformer.resblocks.0.attn.in_proj_weight"
# Tensors outside the vision tower: the text tower, and scalars in OpenAI's archives.
_TEXT = re.compile(
    r"(.*\.)?(transformer\.resblocks\..+|token_embedding\.weight|positional_embedding|ln_final\.(weight|bias)"
    r"|text_projection|logit_scale|logit_bias|attn_mask|input_resolution|context_length|vocab_size)"
)


def _renamed(name: str, rules: _Rules) -> str:
    for pattern, new in rules:
        name = re.sub(pattern, new, name)
    return name


def _rename_all(rules: _Rules, checkpoint: Checkpoint) -> Checkpoint:
    names = {key: _renamed(key, rules) for key in (*checkpoint.entries, *checkpoint.aliases)}
    taken: dict[str, str] = {}
    for old, new in names.items():
        if new in taken:
            raise CheckpointError(
                f"{checkpoint.path} holds both {taken[new]!r} and {old!r}, two names of {new!r}; "
                "remove the one from an earlier save"
            )
        taken[new] = old
    return replace(
        checkpoint,
        entries={names[key]: entry for key, entry in checkpoint.entries.items()},
        aliases={names[key]: names[target] for key, target in checkpoint.aliases.items()},
    )


modern_layer_norm = partial(_rename_all, _LAYER_NORM)
dinov2_names = partial(_rename_all, _ATTENTION)
vit_names = partial(_rename_all, _VIT)


def deberta_names(checkpoint: Checkpoint) -> Checkpoint:
    """Apply `modern_layer_norm`; refuse a head without GELU, which all published DeBERTas have."""
    activation = (checkpoint.config or {}).get("pooler_hidden_act", "gelu")
    if activation != "gelu":
        raise IncompatibleError(
            f"{checkpoint.path}: 'pooler_hidden_act' in a DeBERTa-v2 config must be 'gelu', got {activation!r}; "
            "name the head's layers and activation in the recipe"
        )
    return modern_layer_norm(checkpoint)


def vision_names(checkpoint: Checkpoint) -> Checkpoint:
    """Rename a CLIP vision tower to the names of `CLIPVisionModelWithProjection`; drop an open_clip text tower."""
    prefixes = [key.removesuffix(_ANCHOR) for key in checkpoint.entries if key.endswith(_ANCHOR)]
    towers = [prefix for prefix in prefixes if prefix + _FIRST in checkpoint.entries]
    if not towers:
        return _rename_all(_UNPREFIXED, checkpoint)
    if len(towers) > 1:
        raise CheckpointError(f"{checkpoint.path} must hold one vision tower, got several: {some(towers)}; keep one")
    entries: dict[str, Entry] = {}
    unknown: list[str] = []
    for key, entry in checkpoint.entries.items():
        if key.startswith(towers[0]):
            tensors = _converted(key.removeprefix(towers[0]), entry)
            entries |= tensors
            unknown += [] if tensors else [key]
        elif not _TEXT.fullmatch(key):
            entries[key] = entry
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path} is not a plain CLIP vision transformer: transformers' CLIP has no place for "
            f"{some(unknown)}; use family generic"
        )
    return replace(checkpoint, entries=entries, aliases={})


def _converted(name: str, entry: Entry) -> dict[str, Entry]:
    if name == "proj":
        return {"visual_projection.weight": entry.transposed()}
    fused = _FUSED.fullmatch(name)
    if fused and entry.spec.shape[0] % 3 == 0:
        width, prefix = entry.spec.shape[0] // 3, f"vision_model.encoder.layers.{fused[1]}.self_attn"
        return {
            f"{prefix}.{letter}_proj.{fused[2]}": entry.rows(number * width, (number + 1) * width)
            for number, letter in enumerate("qkv")
        }
    new = _renamed(name, _OPEN_CLIP)
    return {} if new == name else {f"vision_model.{new}": entry}
