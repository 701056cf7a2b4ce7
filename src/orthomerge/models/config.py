"""The config.json of a merged encoder, and of a classifier exported from it.

Of a config that somebody else wrote, only keys of the table below are used and written: they say what a model is. Keys
that say how to load or run one (`auto_map`, `attn_implementation`, `quantization_config`, ...) have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orthomerge.models.family import Family

# What the encoder classes of the families read from their config; a test compares this with transformers.
KNOWN = frozenset(
    {
        "activation", "add_cross_attention", "apply_layernorm", "attention_dropout", "attention_head_size",
        "attention_probs_dropout_prob", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "cls_dropout",
        "conv_act", "conv_groups", "conv_kernel_size", "d_ff", "d_kv", "d_model", "decoder_start_token_id",
        "dense_act_fn", "dim", "drop_path_rate", "dropout", "dropout_rate", "embedding_size", "encoder_stride",
        "eos_token_id", "feed_forward_proj", "head_dim", "hidden_act", "hidden_dim", "hidden_dropout_prob",
        "hidden_size", "image_size", "initializer_factor", "initializer_range", "intermediate_size", "is_decoder",
        "is_encoder_decoder", "is_gated_act", "layer_norm_eps", "layer_norm_epsilon", "layerscale_value", "legacy",
        "logit_scale_init_value", "max_position_embeddings", "max_relative_positions", "mlp_ratio", "model_type",
        "n_heads", "n_layers", "norm_rel_ebd", "num_attention_heads", "num_channels", "num_decoder_layers", "num_heads",
        "num_hidden_layers", "num_layers", "out_features", "out_indices", "pad_token_id", "patch_size", "pooler_act",
        "pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "pooler_output_size", "pos_att_type",
        "position_biased_input", "position_buckets", "projection_dim", "qa_dropout", "qkv_bias", "relative_attention",
        "relative_attention_max_distance", "relative_attention_num_buckets", "reshape_hidden_states",
        "scale_decoder_outputs", "seq_classif_dropout", "share_att_key", "sinusoidal_pos_embds", "stage_names",
        "summary_activation", "summary_first_dropout", "summary_last_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj", "tie_word_embeddings", "tokenizer_class", "type_vocab_size", "use_cache", "use_mask_token",
        "use_swiglu_ffn", "vocab_size",
    }
)  # fmt: skip


def encoder_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """A checkpoint's config, made to say what its encoder is; nothing in it depends on a head or a dtype."""
    inner = config.get("vision_config")
    if family.modality == "image" and isinstance(inner, Mapping):  # CLIP has two towers; the encoder is that of images
        shared = {"projection_dim": config["projection_dim"]} if "projection_dim" in config else {}
        config = {**inner, **shared, "model_type": "clip_vision_model"}
    return {key: value for key, value in config.items() if key in KNOWN}


def classifier_config(config: Mapping[str, Any], family: Family, labels: tuple[str, ...], dtype: str) -> dict[str, Any]:
    """An encoder's config, made to say what the stock classifier on top of it is."""
    if config.get("model_type") == "clip_vision_model":
        # The stock classifier is configured as a CLIP of two towers, and builds the one only.
        config = {"model_type": "clip", "vision_config": dict(config)}
    return {
        **config,
        "dtype": dtype,
        "architectures": [family.architecture],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }
