"""Loading encoders: everything accounted for, nothing left behind."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orthomerge.errors import CheckpointError, RecipeError
from orthomerge.models.families import family
from orthomerge.models.generic import generic
from orthomerge.models.load import load_encoder, quiet

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, build: Any, save: Any) -> Path:
    saved = save(build("BertModel", "bert"), tmp_path / "bert")
    assert isinstance(saved, type(tmp_path))
    return saved


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Put tensors in, or take them out; `__` stands for a dot."""
    tensors: dict[str, torch.Tensor | None] = dict(load_file(folder / "model.safetensors"))
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_loads_in_eval_mode_with_the_weights_of_the_file(folder: Path) -> None:
    encoder = load_encoder(folder, family("bert"))
    assert not encoder.training
    state = encoder.state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(state[name], tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_is_that_of_the_files_whatever_the_config_says(dtype: torch.dtype, folder: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert {p.dtype for p in load_encoder(folder, family("bert")).parameters()} == {dtype}


def test_mixed_dtypes_lose_nothing(folder: Path) -> None:
    change(folder, pooler__dense__bias=torch.ones(16, dtype=torch.bfloat16))
    assert {p.dtype for p in load_encoder(folder, family("bert")).parameters()} == {torch.float32}


def test_missing_weights_are_refused_and_never_made_up(folder: Path) -> None:
    gone = {f"encoder__layer__{layer}__output__dense__{part}": None for layer in (0, 1) for part in ("weight", "bias")}
    change(folder, **gone)
    with pytest.raises(
        CheckpointError, match=r"BertModel: it lacks 'encoder.layer.0.output.dense.bias', .* and 1 more"
    ):
        load_encoder(folder, family("bert"))


def test_other_shapes_are_refused(folder: Path) -> None:
    change(folder, pooler__dense__bias=torch.ones(3))
    with pytest.raises(CheckpointError, match=r"other shapes to 'pooler.dense.bias \(3,\) instead of \(16,\)'"):
        load_encoder(folder, family("bert"))


def test_weights_without_a_place_are_refused(folder: Path) -> None:
    change(folder, classifier__weight=torch.ones(3, 16))
    with pytest.raises(CheckpointError, match=r"the model has no place for 'classifier.weight'"):
        load_encoder(folder, family("bert"))


def test_optional_weights_may_be_left_over(tmp_path: Path, build: Any, save: Any) -> None:
    # The stock classifier builds RoBERTa without pooler; pre-trained models have one.
    folder = save(build("RobertaModel", "roberta"), tmp_path / "roberta")
    change(folder, embeddings__position_ids=torch.arange(512)[None])
    assert "pooler.dense.weight" in load_file(folder / "model.safetensors")
    assert not any("pooler" in name for name in load_encoder(folder, family("roberta")).state_dict())


def test_bert_without_pooler_is_built_without_one(folder: Path) -> None:
    change(folder, pooler__dense__weight=None, pooler__dense__bias=None)
    found = family("bert")
    encoder = load_encoder(folder, found)
    batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    assert found.features(encoder, batch, "cls").shape == (1, 16)
    with pytest.raises(RecipeError, match="this one has none"):
        found.features(encoder, batch, "pooler")


def test_half_a_pooler_is_refused(folder: Path) -> None:
    change(folder, pooler__dense__bias=None)
    with pytest.raises(CheckpointError, match=r"it lacks 'pooler.dense.bias'"):
        load_encoder(folder, family("bert"))


def test_another_model_type_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="must say 'model_type' 'roberta' for family 'roberta', got 'bert'"):
        load_encoder(folder, family("roberta"))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"must say 'model_type' 'bert' .* got None"):
        load_encoder(folder, family("bert"))


def test_what_transformers_refuses_is_our_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3}))
    with pytest.raises(CheckpointError, match=r"transformers cannot load .*bert as BertModel: .*16"):
        load_encoder(folder, family("bert"))


def test_generic_cannot_be_loaded(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"'generic' has no class to load .* build the module yourself"):
        load_encoder(folder, generic("bert"))


def test_without_transformers_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    with pytest.raises(RecipeError, match=r"pip install 'orthomerge\[models\]'"):
        load_encoder(folder, family("bert"))


def test_nothing_is_printed_and_settings_come_back(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    change(folder, classifier__weight=torch.ones(3, 16))
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    with pytest.raises(CheckpointError, match="no place for"):
        load_encoder(folder, family("bert"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    with quiet():
        assert not logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")
