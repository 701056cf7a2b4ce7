"""A base and two experts of any family, made on the spot, and how users load what is written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tests.models.conftest import _build

import orthomerge as om
from orthomerge.models.experts import Experts
from orthomerge.models.families import family
from orthomerge.models.load import quiet
from orthomerge.models.model import Model
from orthomerge.models.tensors import Tensors

TASKS = ("one", "two")
LETTERS = "abcdefghijklmnopqrstuvwxyz."
HEADS = {"one": {"classes": ["cat", "dog"]}, "two": {"classes": ["bee", "cat", "dog"], "templates": ["the {}"]}}


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
    base = _build(class_of(name), name, 0)
    return {"base": base, **{task: nudged(base, seed) for seed, task in enumerate(TASKS, 1)}}


def write_models(name: str, folder: Path) -> dict[str, Any]:
    """The same in folders; CLIP with its tokenizer."""
    models = live_models(name)
    with quiet():
        for role, model in models.items():
            model.save_pretrained(folder / role)
    if name == "clip":
        write_tokenizer(folder / "base")
    return models


def open_models(name: str, folder: Path) -> Experts:
    """Experts from their folders."""
    heads = HEADS if name == "clip" else {}
    return om.open({task: folder / task for task in TASKS}, base=folder / "base", heads=heads)


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


def write_tokenizer(folder: Path) -> None:
    """CLIP's: letters, letters that end a word, and three merges: numbers 0 to 57; then start and end."""
    merges = [("o", "f</w>"), ("c", "a"), ("ca", "t</w>")]
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *("".join(pair) for pair in merges)]
    tokens += ["<unk>"] * (58 - len(tokens)) + ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))
