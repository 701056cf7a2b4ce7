"""Tiny models of every family, made on the spot with random weights."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from orthomerge.models.load import quiet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orthomerge.models.family import Family

WIDTH, LABELS = 16, 5
TEXT = {"vocab_size": 60, "num_labels": LABELS}
BERT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IMAGE = {"image_size": 8, "patch_size": 4}
T5 = {"d_model": WIDTH, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 24, "decoder_start_token_id": 0}
CLIP = {
    "text_config": {
        **BERT,
        "vocab_size": 60,
        "max_position_embeddings": 16,
        "eos_token_id": 59,
        "bos_token_id": 58,
    },
    "vision_config": {**BERT, **IMAGE, "projection_dim": 8},
    "projection_dim": 8,
    "num_labels": LABELS,
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {**BERT, **TEXT}),
    "roberta": ("RobertaConfig", {**BERT, **TEXT}),
    "xlm_roberta": ("XLMRobertaConfig", {**BERT, **TEXT}),
    "camembert": ("CamembertConfig", {**BERT, **TEXT}),
    "distilbert": ("DistilBertConfig", {"dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, **TEXT}),
    "electra": ("ElectraConfig", {**BERT, **TEXT, "embedding_size": 8}),
    "deberta_v2": ("DebertaV2Config", {**BERT, **TEXT, "relative_attention": True, "type_vocab_size": 2}),
    "t5": ("T5Config", {**T5, **TEXT}),
    "t5_encoder": ("T5Config", {**T5, **TEXT}),
    "vit": ("ViTConfig", {**BERT, **IMAGE, "num_labels": LABELS}),
    "deit": ("DeiTConfig", {**BERT, **IMAGE, "num_labels": LABELS}),
    "dinov2": (
        "Dinov2Config",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            **IMAGE,
            "num_labels": LABELS,
        },
    ),
    "clip": ("CLIPConfig", CLIP),
    "clip_vision": ("CLIPVisionConfig", {**BERT, **IMAGE, "projection_dim": 8}),
    "clip_classifier": ("CLIPConfig", CLIP),
}


@cache
def _build(class_name: str, family_name: str, seed: int) -> Any:
    with quiet():
        import transformers

        config_class, options = OPTIONS[family_name]
        model = getattr(transformers, class_name)(getattr(transformers, config_class)(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Larger than stock initial values, biases included, so that nothing goes unnoticed.
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model.eval()


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """`build(class_name, family_name)`: a stock model with the tiny config of a family."""

    def builder(class_name: str, family_name: str, seed: int = 0) -> Any:
        return _build(class_name, family_name, seed)

    return builder


@pytest.fixture(scope="session")
def save() -> Callable[[Any, Path], Path]:
    """Save a model as transformers does, without its progress bars."""

    def saver(model: Any, folder: Path) -> Path:
        with quiet():
            model.save_pretrained(folder)
        return folder

    return saver


@pytest.fixture(scope="session")
def batch_for() -> Callable[[Family, Any], dict[str, torch.Tensor]]:
    """A random batch; texts end at different places and are padded."""

    def batch(family: Family, config: Any) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        if family.modality == "image":
            return {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
        ids = torch.randint(5, 50, (4, 7), generator=generator)
        mask = (torch.arange(7) < torch.tensor([[7], [5], [3], [6]])).long()
        if family.model_types == ("t5",):
            ids[torch.arange(4), mask.sum(1) - 1] = config.eos_token_id
        return {"input_ids": ids * mask + config.pad_token_id * (1 - mask), "attention_mask": mask}

    return batch


@pytest.fixture(scope="session")
def account() -> Callable[..., dict[str, str]]:
    """What each name of a checkpoint is to a family: a canonical name, `head` or `foreign`."""

    def accountant(family: Family, names: list[str]) -> dict[str, str]:
        heads = family.head.parts().values() if family.head else ()
        inside = any(name.startswith(family.prefix) for name in names)
        found = {}
        for name in names:
            if name in heads:
                found[name] = "head"
            elif any(fnmatchcase(name, pattern) for pattern in family.foreign):
                found[name] = "foreign"
            elif name.startswith(family.prefix) or not inside:
                found[name] = name.removeprefix(family.prefix)
            else:
                pytest.fail(f"{family.name} does not account for {name}")
        return found

    return accountant
