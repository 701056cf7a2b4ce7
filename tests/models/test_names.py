"""Names of older and other writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from orthomerge.core.errors import CheckpointError, IncompatibleError
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.families import family

if TYPE_CHECKING:
    from pathlib import Path


def opened(folder: Path, *names: str) -> Checkpoint:
    path = folder / "names.safetensors"
    save_file({name: torch.full((2,), float(number)) for number, name in enumerate(names)}, path)
    return open_checkpoint(path)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra", "deberta_v2"])
def test_gamma_and_beta_become_weight_and_bias(name: str, tmp_path: Path) -> None:
    old = opened(tmp_path, "bert.embeddings.LayerNorm.gamma", "x.output.LayerNorm.beta", "LayerNorm.beta", "x.gamma")
    adapted = family(name).adapted(old)
    first = "bert.embeddings.LayerNorm.weight"
    assert set(adapted) == {first, "x.output.LayerNorm.bias", "LayerNorm.bias", "x.gamma"}
    assert (adapted[first].tolist(), adapted["LayerNorm.bias"].tolist()) == ([0.0, 0.0], [2.0, 2.0])


def test_aliases_are_renamed_too(tmp_path: Path) -> None:
    adapt = family("bert").adapted
    plain = opened(tmp_path, "a.LayerNorm.gamma")
    adapted = adapt(Checkpoint(plain.path, plain.entries, aliases={"b.LayerNorm.gamma": "a.LayerNorm.gamma"}))
    assert adapted.aliases == {"b.LayerNorm.weight": "a.LayerNorm.weight"}
    assert torch.equal(adapted["b.LayerNorm.weight"], plain["a.LayerNorm.gamma"])


def test_both_old_and_new_name_is_an_error(tmp_path: Path) -> None:
    adapt = family("bert").adapted
    with pytest.raises(CheckpointError, match=r"both 'LayerNorm\.\w+' and .* two names of 'LayerNorm.weight'"):
        adapt(opened(tmp_path, "LayerNorm.gamma", "LayerNorm.weight"))


@pytest.mark.parametrize("name", ["clip", "clip_classifier"])
def test_bare_vision_model_of_transformers_5(name: str, tmp_path: Path) -> None:
    adapt = family(name).adapted
    adapted = adapt(
        opened(tmp_path, "embeddings.class_embedding", "encoder.layers.0.mlp.fc1.bias", "pre_layrnorm.bias")
    )
    assert set(adapted) == {
        "vision_model.embeddings.class_embedding",
        "vision_model.encoder.layers.0.mlp.fc1.bias",
        "vision_model.pre_layrnorm.bias",
    }


def test_deberta_with_another_activation_is_refused(tmp_path: Path) -> None:
    adapt = family("deberta_v2").adapted
    plain = opened(tmp_path, "deberta.x")
    assert set(adapt(Checkpoint(plain.path, plain.entries, {"pooler_hidden_act": "gelu"}))) == {"deberta.x"}
    with pytest.raises(IncompatibleError, match=r"'pooler_hidden_act' in a DeBERTa-v2 .* must be 'gelu', got 'tanh'"):
        adapt(Checkpoint(plain.path, plain.entries, {"pooler_hidden_act": "tanh"}))
