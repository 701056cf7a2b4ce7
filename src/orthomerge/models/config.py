"""The config.json of a merged encoder, and of a classifier exported from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orthomerge.models.family import Family

__all__ = ["classifier_config", "encoder_config"]

# What a config says of a classifier, and what must not be carried over from one checkpoint to another.
_OF_A_CLASSIFIER = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task")
_STALE = ("_name_or_path", "_commit_hash", "auto_map", "transformers_version", "torch_dtype", "dtype")


def encoder_config(config: Mapping[str, Any], family: Family, dtype: str) -> dict[str, Any]:
    """The base's config, made to say what the merged encoder is."""
    inner = config.get("vision_config")
    if family.modality == "image" and isinstance(
        inner, Mapping
    ):  # a CLIP of two towers; the encoder is the one that sees
        kind = {"model_type": "clip_vision_model"}
        shared = {"projection_dim": config["projection_dim"]} if "projection_dim" in config else {}
        config = {**inner, **shared, **kind}
    kept = {key: value for key, value in config.items() if key not in (*_OF_A_CLASSIFIER, *_STALE)}
    return {**kept, "architectures": [family.encoder_class], "dtype": dtype}


def classifier_config(config: Mapping[str, Any], family: Family, labels: tuple[str, ...]) -> dict[str, Any]:
    """An encoder's config, made to say what the exported classifier is."""
    if config.get("model_type") == "clip_vision_model":
        # The stock classifier is configured as a CLIP of two towers, and builds the one only.
        vision = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
        config = {"model_type": "clip", "vision_config": vision, "dtype": config.get("dtype")}
    return {
        **config,
        "architectures": [family.architecture],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }
