"""Stock classifiers of transformers: which one computes what a head does, and a folder that it loads.

Of a config that somebody else wrote, only known keys are used and written: they say what a model is. Keys that say how
to load or run one (`auto_map`, `attn_implementation`, `quantization_config`, ...) have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.sizes import parse_size
from orthomerge.core.version import VERSION
from orthomerge.files.checkpoint import DTYPES, Spec, is_float, torch_dtype
from orthomerge.files.ownership import EXPORT, write_marker
from orthomerge.files.publish import publish, write_json
from orthomerge.files.shards import write_shards
from orthomerge.models.family import Family
from orthomerge.models.heads import Head

if TYPE_CHECKING:
    import torch

    from orthomerge.models.heads import Extra
    from orthomerge.models.model import Model


_WAY_OUT = "use orthomerge.load, which computes every head"
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


def why_not_stock(family: Family, classifier: Head | Extra) -> str | None:
    """Why no stock class computes what a classifier does; None where one does."""
    if not isinstance(classifier, Head):
        return (
            f"its classifier is a head behind a module of {classifier.kind!r}, for which transformers has no place; "
            "align the merge with an aligner that gives a head, such as auto"
        )
    if family.architecture is None or family.head is None:
        return f"transformers has no classifier that computes what {family.name!r} does"
    pooling = classifier.pooling or family.default_pooling
    if pooling != family.default_pooling:
        return f"{family.architecture} reads features by {family.default_pooling!r}, this head by {pooling!r}"
    built = (2 if classifier.hidden is not None else 1, classifier.activation, classifier.normalise)
    if built != (len(family.head.layers), family.head.activation, family.head.normalise):
        return f"the head is built otherwise than in {family.architecture}"
    return None


def head_names(family: Family, head: Head) -> dict[str, str]:
    """Part of a head -> name on disk: the stock classifier's where the layers are like its own."""
    parts = head.tensors()
    layout = family.head
    if layout is None or len(layout.layers) != (2 if head.hidden is not None else 1):
        return {part: part for part in parts}
    return {part: name for part, name in layout.parts().items() if part in parts}


def named_tensors(family: Family, head: Head) -> dict[str, torch.Tensor]:
    """A head's tensors by their names on disk."""
    tensors = head.tensors()
    return {name: tensors[part] for part, name in head_names(family, head).items()}


def main_dtype(specs: Iterable[Spec]) -> str:
    """The dtype of most floating-point tensors."""
    dtypes = [spec.dtype for spec in specs if is_float(spec.dtype)]
    return max(sorted(set(dtypes)), key=dtypes.count) if dtypes else "F32"


def export(model: Model, task: str, out: Path, *, force: bool = False, inputs: tuple[Path, ...] = ()) -> None:
    """Write one task as a folder that its stock class loads. `inputs`: what `out` must not overlap."""
    head, family = model.head(task), model.family
    why = why_not_stock(family, head)
    if why is not None or not isinstance(head, Head):
        raise RecipeError(f"no stock class computes what the head of {task!r} does: {why}; {_WAY_OUT}")
    encoder = {family.prefix + key: spec for key, spec in model.weights.specs.items()}
    dtype = main_dtype(encoder.values())
    tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in named_tensors(family, head).items()}
    specs = {**encoder, **{name: Spec(tuple(tensor.shape), dtype) for name, tensor in tensors.items()}}

    def blocks() -> Iterator[tuple[str, torch.Tensor]]:
        for key, block in model.weights.blocks():
            yield family.prefix + key, block
        yield from tensors.items()

    need = sum(spec.nbytes for spec in specs.values())
    config = classifier_config(model.config, family, head.labels, DTYPES[dtype][1])
    with publish(out, force=force, need=need, inputs=inputs, marker=EXPORT) as folder:
        write_shards(folder, specs, blocks(), most=parse_size("5GB"))
        model.processor.write(folder)
        write_json(folder / "config.json", config)
        write_marker(folder, EXPORT, orthomerge=VERSION, task=task, model=model.digest)
