"""Tiny models of any family with random weights, a base and two experts of it, and how users load what is written."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

import orthomerge as om
from orthomerge.models.experts import Experts
from orthomerge.models.families import family
from orthomerge.models.family import Family
from orthomerge.models.model import Model
from orthomerge.models.skeleton import quiet
from orthomerge.models.tensors import Tensors

TASKS = ("one", "two")
LETTERS = "abcdefghijklmnopqrstuvwxyz."
HEADS = {"one": {"classes": ["cat", "dog"]}, "two": {"classes": ["bee", "cat", "dog"], "templates": ["the {}"]}}
WIDTH, LABELS = 16, 5
TEXT = {"vocab_size": 99, "num_labels": LABELS}
BERT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IMAGE = {"image_size": 8, "patch_size": 4}
T5 = {"d_model": WIDTH, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 24, "decoder_start_token_id": 0}
TOWER = {"vocab_size": 60, "max_position_embeddings": 16, "eos_token_id": 59, "bos_token_id": 58}
CLIP = {
    "text_config": {**BERT, **TOWER},
    "vision_config": {**BERT, **IMAGE, "projection_dim": 8},
    "projection_dim": 8,
    "num_labels": LABELS,
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {**BERT, **TEXT} for name in ("bert", "roberta", "xlm_roberta", "camembert")},
    "distilbert": {"dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, **TEXT},
    "electra": {**BERT, **TEXT, "embedding_size": 8},
    "deberta_v2": {**BERT, **TEXT, "relative_attention": True, "type_vocab_size": 2},
    **{name: {**T5, **TEXT} for name in ("t5", "t5_encoder")},
    **{name: {**BERT, **IMAGE, "num_labels": LABELS} for name in ("vit", "deit", "dinov2")},
    **dict.fromkeys(("clip", "clip_classifier"), CLIP),
    "clip_vision": {**BERT, **IMAGE, "projection_dim": 8},
}


@cache
def build(class_name: str, family_name: str, seed: int = 0) -> Any:
    """A stock model with the tiny config of a family; nobody may change it."""
    with quiet():
        import transformers

        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**OPTIONS[family_name]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Larger than stock initial values, biases included, so that nothing goes unnoticed.
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    """Save a model as transformers does, without its progress bars."""
    with quiet():
        model.save_pretrained(folder)
    return folder


def batch_for(family: Family, config: Any) -> dict[str, torch.Tensor]:
    """A random batch; texts end at different places and are padded."""
    generator = torch.Generator().manual_seed(1)
    if family.modality == "image":
        return {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
    ids = torch.randint(5, 50, (4, 7), generator=generator)
    mask = (torch.arange(7) < torch.tensor([[7], [5], [3], [6]])).long()
    if family.model_types == ("t5",):
        ids[torch.arange(4), mask.sum(1) - 1] = config.eos_token_id
    return {"input_ids": ids * mask + config.pad_token_id * (1 - mask), "attention_mask": mask}


def nudged(model: Any, seed: int, size: float = 0.02) -> Any:
    """A copy whose weights differ a little, as a fine-tuned one's do."""
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return twin


def class_of(name: str) -> str:
    """The class of a family's experts; two families have no classifier."""
    return family(name).architecture or {"clip": "CLIPModel", "t5_encoder": "T5ForTokenClassification"}[name]


def live_models(name: str) -> dict[str, Any]:
    """`base`, `one` and `two` of a family, in memory."""
    base = build(class_of(name), name)
    return {"base": base, **{task: nudged(base, seed) for seed, task in enumerate(TASKS, 1)}}


def write_models(name: str, folder: Path) -> dict[str, Any]:
    """The same in folders; CLIP with its tokenizer."""
    models = live_models(name)
    for role, model in models.items():
        save(model, folder / role)
    if name == "clip":
        write_tokenizer(folder / "base")
    return models


def open_models(name: str, folder: Path) -> Experts:
    """Experts from their folders."""
    heads = HEADS if name == "clip" else {}
    return om.open({task: folder / task for task in TASKS}, base=folder / "base", heads=heads)


def average(name: str, folder: Path) -> Model:
    """The average of a family's two experts, which are written to a folder first."""
    write_models(name, folder)
    return om.merge(open_models(name, folder), "average")


def reloaded(model: Model, folder: Path) -> Model:
    """The model as it comes back from a folder."""
    model.save(folder)
    return om.load(folder)


def tensors_of(tensors: Tensors | Model) -> dict[str, torch.Tensor]:
    """All tensors by name, flat."""
    stream = tensors.weights if isinstance(tensors, Model) else tensors
    blocks: dict[str, list[torch.Tensor]] = {}
    for key, block in stream.blocks():
        blocks.setdefault(key, []).append(block.reshape(-1))
    return {key: torch.cat(each) for key, each in blocks.items()}


def same_tensors(one: Tensors | Model, other: Tensors | Model) -> bool:
    """Whether two models have the same tensors under the same names in the same order, bit by bit."""
    first, second = tensors_of(one), tensors_of(other)
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


def stock(folder: Path) -> Any:
    """A folder as a user loads it; nothing may be missing or left over."""
    with quiet():
        import transformers

        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        auto = "AutoModelForImageClassification" if "Image" in name else "AutoModelForSequenceClassification"
        model, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == name
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def flip_a_bit(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def write_clip(folder: Path) -> Path:
    """A CLIP with its tokenizer."""
    save(build("CLIPModel", "clip"), folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """CLIP's: letters, letters that end a word, and three merges: numbers 0 to 57; then start and end."""
    merges = [("o", "f</w>"), ("c", "a"), ("ca", "t</w>")]
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *("".join(pair) for pair in merges)]
    tokens += ["<unk>"] * (58 - len(tokens)) + ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))
