"""Stock encoders of transformers, built for tensors of given names and shapes and then filled with them.

transformers never reads an untrusted folder: a module is built from known keys of the config that define an
architecture. Keys about loading or running (`auto_map`, `attn_implementation`, `quantization_config`, ...) have no
effect. Some modules of transformers 5 have other names than the saved tensors, so a state dict of tensors filled with
their own numbers is loaded once, and the location of each number gives the mapping of names.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

from orthomerge.core.errors import CheckpointError, RecipeError, some
from orthomerge.files.checkpoint import Spec, is_float, torch_dtype
from orthomerge.models.family import Family, matches
from orthomerge.models.tensors import Tensors

if TYPE_CHECKING:
    import torch


_FIRST_TAG = 3  # tensors are tagged with numbers from here on, because modules are initialised with 0 and 1
# Config keys of the families' encoder classes; a test compares them with transformers.
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
    """Reduce a checkpoint's config to that of its encoder, independent of heads and dtypes."""
    if family.modality == "image" and isinstance(
        config.get("vision_config"), Mapping
    ):  # CLIP: the encoder is the vision tower
        config = {**tower_config(config, "vision_config"), "model_type": "clip_vision_model"}
    return {key: value for key, value in config.items() if key in KNOWN}


def tower_config(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Select the config of one of CLIP's towers; the config itself if it has no such part."""
    inner = config.get(part)
    if not isinstance(inner, Mapping):
        return config
    return {**inner, **{key: config[key] for key in ("model_type", "projection_dim") if key in config}}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and progress bars of transformers, and restore its settings afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        # Importing DeBERTa-v2 compiles functions with a deprecated API.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is deprecated", category=DeprecationWarning)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A stock encoder. `names`: canonical name -> name in the module's state dict, without absent optional tensors."""

    module: torch.nn.Module
    names: Mapping[str, str]

    @classmethod
    def of(cls, family: Family, config: Mapping[str, Any], tensors: Tensors) -> Skeleton:
        skeleton = cls.build(family, config, tensors.specs)
        skeleton.fill(tensors)
        return skeleton

    @classmethod
    def build(cls, family: Family, config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Skeleton:
        """Build the module for these tensors, which must correspond one to one to the module's weights."""
        if not family.encoder_class:
            raise RecipeError(f"family {family.name!r} has no class to build; build the module yourself")
        import torch

        tags = {key: torch.full(spec.shape, float(tag)) for tag, (key, spec) in enumerate(specs.items(), _FIRST_TAG)}
        module = _load(family, config, tags)
        names = _module_names(family, module, tags)
        dtypes = [torch_dtype(dtype) for dtype in sorted({spec.dtype for spec in specs.values()}) if is_float(dtype)]
        module.to(reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else torch.float32)  # exact for all
        return cls(module.eval(), names)

    def fill(self, tensors: Tensors) -> None:
        import torch

        state = self.module.state_dict()
        targets = {key: state[name].view(-1) for key, name in self.names.items()}
        filled = Counter[str]()
        with torch.no_grad():
            for key, block in tensors.blocks():
                start = filled[key]
                filled[key] += block.numel()
                if key in targets:
                    targets[key][start : filled[key]].copy_(block.reshape(-1))
        incomplete = [key for key, target in targets.items() if filled[key] != target.numel()]
        if incomplete:
            raise AssertionError(f"the stream ended before {some(incomplete)} was complete")


def _load(family: Family, config: Mapping[str, Any], tags: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    options = {}
    if "pooler.*" in family.optional:  # for families that do not use it, or files without it
        options["add_pooling_layer"] = "pooler" in family.poolings and any(key.startswith("pooler.") for key in tags)
    with quiet():
        import torch
        import transformers

        cls = getattr(transformers, family.encoder_class)
        known_config = {key: value for key, value in config.items() if key in KNOWN and key != "model_type"}
        try:
            module, info = cls.from_pretrained(
                None,
                config=cls.config_class(**known_config),
                state_dict=dict(tags),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # then they are listed, and refused below
                dtype=torch.float32,
                **options,
            )
        except Exception as error:  # of any class, by underlying library
            raise CheckpointError(
                f"transformers cannot build {family.encoder_class}: {error}; correct its config.json, or fetch it again"
            ) from error
    problems = {
        "they lack": info["missing_keys"],
        "the config gives other shapes to": [
            f"{name} {tuple(stored)} instead of {tuple(expected)}" for name, stored, expected in info["mismatched_keys"]
        ],
        "the model has no place for": [key for key in info["unexpected_keys"] if not matches(key, family.optional)],
    }
    for problem, keys in problems.items():
        if keys:
            raise CheckpointError(
                f"the weights do not fit {family.encoder_class}: {problem} {some(sorted(keys))}; "
                "no weight is initialised at random, so give the config.json that belongs to these weights"
            )
    return cast("torch.nn.Module", module)


def _module_names(family: Family, module: torch.nn.Module, tags: Mapping[str, torch.Tensor]) -> dict[str, str]:
    keys, names, owners = list(tags), dict[str, str](), dict[int, str]()
    for name, tensor in module.state_dict().items():
        if not tensor.numel():
            continue
        low, high = float(tensor.min()), float(tensor.max())
        number = int(low) - _FIRST_TAG
        if low != high or not 0 <= number < len(keys) or low != int(low):
            raise CheckpointError(
                f"{family.encoder_class} stores {name!r} in another form than checkpoints do; this version of "
                "transformers is not supported for it: install another one"
            )
        if names.get(keys[number], name) != name and owners.get(tensor.data_ptr()) != keys[number]:
            raise CheckpointError(
                f"{family.encoder_class} holds {keys[number]!r} twice; install another version of transformers"
            )
        names.setdefault(keys[number], name)
        owners[tensor.data_ptr()] = keys[number]
    return names
