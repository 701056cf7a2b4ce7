"""Every family against the stock classifier of transformers that it describes."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orthomerge.files.opening import open_checkpoint
from orthomerge.files.safetensors import read_safetensors
from orthomerge.models.families import FAMILIES, family
from orthomerge.models.heads import Head, Linear
from orthomerge.models.modules import Encoder
from orthomerge.models.skeleton import encoder_config
from orthomerge.models.tensors import MemoryTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from orthomerge.models.family import Family, HeadLayout

WITH_CLASSIFIER = [name for name in FAMILIES if family(name).architecture is not None]
# Other stock models from which experts are made, or which people have lying around.
OTHERS = [
    ("bert", "BertModel"),
    ("bert", "BertForPreTraining"),
    ("bert", "BertForMaskedLM"),
    ("roberta", "RobertaModel"),
    ("roberta", "RobertaForMaskedLM"),
    ("xlm_roberta", "XLMRobertaForMaskedLM"),
    ("camembert", "CamembertForMaskedLM"),
    ("distilbert", "DistilBertForMaskedLM"),
    ("electra", "ElectraForPreTraining"),
    ("electra", "ElectraForMaskedLM"),
    ("deberta_v2", "DebertaV2Model"),
    ("deberta_v2", "DebertaV2ForMaskedLM"),
    ("t5", "T5Model"),
    ("t5", "T5ForConditionalGeneration"),
    ("t5_encoder", "T5EncoderModel"),
    ("t5_encoder", "T5ForConditionalGeneration"),
    ("t5_encoder", "T5ForTokenClassification"),
    ("vit", "ViTModel"),
    ("vit", "ViTForMaskedImageModeling"),
    ("deit", "DeiTModel"),
    ("deit", "DeiTForImageClassificationWithTeacher"),
    ("deit", "DeiTForMaskedImageModeling"),
    ("dinov2", "Dinov2Model"),
    ("clip", "CLIPModel"),
    ("clip_classifier", "CLIPModel"),
]


def split_off(
    folder: Path, found: Family, account: Callable[..., dict[str, str]]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The encoder under its canonical names as a module, and the head's tensors."""
    tensors = load_file(folder / "model.safetensors")
    roles = account(found, list(tensors))
    parts = {roles[name]: tensor for name, tensor in tensors.items() if roles[name] not in ("head", "foreign")}
    config = encoder_config(json.loads((folder / "config.json").read_text()), found)
    encoder = Encoder(found, config, MemoryTensors(parts)).module()
    return encoder, {name: tensor for name, tensor in tensors.items() if roles[name] == "head"}


def make_head(layout: HeadLayout, tensors: Mapping[str, torch.Tensor]) -> Head:
    layers = [Linear(tensors[f"{layer}.weight"], tensors[f"{layer}.bias"]) for layer in layout.layers]
    labels = tuple(f"class {row}" for row in range(len(layers[-1].weight)))
    hidden = layers[0] if len(layers) == 2 else None
    return Head(layers[-1], labels, hidden, layout.activation, layout.normalise)


@pytest.mark.parametrize("name", WITH_CLASSIFIER)
def test_encoder_pooling_and_head_give_the_stock_logits(
    name: str, tmp_path: Path, build: Any, save: Any, batch_for: Any, account: Any
) -> None:
    found = family(name)
    assert found.architecture is not None
    assert found.head is not None
    model = build(found.architecture, name)
    batch = batch_for(found, model.config)
    encoder, tensors = split_off(save(model, tmp_path / "whole"), found, account)
    assert set(tensors) == set(found.head.parts().values())
    head = make_head(found.head, tensors)
    with torch.no_grad():
        features = found.features(encoder, batch, found.default_pooling)
        expected = model(**batch).logits
        torch.testing.assert_close(head(features), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.01  # and not because all is zero
    assert head.width == features.shape[1]


@pytest.mark.parametrize(("name", "class_name"), OTHERS)
def test_other_stock_models_hold_the_same_encoder(
    name: str, class_name: str, tmp_path: Path, build: Any, save: Any, account: Any
) -> None:
    found = family(name)
    # Where there is no stock classifier, the encoder itself is the reference.
    whole = build(found.architecture or found.encoder_class, "clip_vision" if name == "clip" else name)

    def encoder_names(model: Any, folder: Path) -> set[str]:
        names = read_safetensors(save(model, folder) / "model.safetensors")
        return set(account(found, list(names)).values()) - {"head", "foreign"}

    expected, held = (
        encoder_names(whole, tmp_path / "whole"),
        encoder_names(build(class_name, name), tmp_path / "x"),
    )
    assert held
    for key in expected ^ held:
        assert any(fnmatchcase(key, pattern) for pattern in found.optional), key


def test_clip_features_are_the_projected_ones(
    tmp_path: Path, build: Any, save: Any, batch_for: Any, account: Any
) -> None:
    found = family("clip")
    model = build("CLIPModel", "clip")
    batch = batch_for(found, model.config)
    encoder, tensors = split_off(save(model, tmp_path / "whole"), found, account)
    assert tensors == {}
    with torch.no_grad():
        features = found.features(encoder, batch, "projection")
        torch.testing.assert_close(features, model.get_image_features(**batch).pooler_output)


def test_t5_encoder_with_a_linear_head(tmp_path: Path, build: Any, save: Any, batch_for: Any, account: Any) -> None:
    found = family("t5_encoder")
    assert found.head is not None
    model = build("T5ForTokenClassification", "t5_encoder")
    batch = batch_for(found, model.config)
    encoder, tensors = split_off(save(model, tmp_path / "whole"), found, account)
    head = make_head(found.head, tensors)
    with torch.no_grad():
        logits = head(found.features(encoder, batch, "mean"))
        # The stock model classifies every token; a linear head and a mean can change places.
        per_token, mask = model(**batch).logits, batch["attention_mask"].unsqueeze(-1)
        torch.testing.assert_close(logits, (per_token * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name).modality == "text" and name != "t5"])
def test_text_poolings_by_hand(name: str, build: Any, batch_for: Any) -> None:
    found = family(name)
    encoder = build(found.encoder_class, name)
    batch = batch_for(found, encoder.config)
    with torch.no_grad():
        hidden = encoder(**batch).last_hidden_state
        torch.testing.assert_close(found.features(encoder, batch, "cls"), hidden[:, 0])
        lengths = batch["attention_mask"].sum(1)
        expected = torch.stack([row[:length].mean(0) for row, length in zip(hidden, lengths, strict=True)])
        torch.testing.assert_close(found.features(encoder, batch, "mean"), expected)


@pytest.mark.parametrize(("name", "skipped"), [("vit", 1), ("deit", 2), ("dinov2", 1), ("clip_classifier", 1)])
def test_image_poolings_by_hand(name: str, skipped: int, build: Any, batch_for: Any) -> None:
    found = family(name)
    if name == "clip_classifier":
        encoder = build("CLIPForImageClassification", name).vision_model
    else:
        encoder = build(found.encoder_class, name)
    batch = batch_for(found, encoder.config)
    with torch.no_grad():
        hidden = encoder(**batch).last_hidden_state
        assert hidden.shape[1] == skipped + 4  # four patches
        torch.testing.assert_close(found.features(encoder, batch, "cls"), hidden[:, 0])
        torch.testing.assert_close(found.features(encoder, batch, "mean"), hidden[:, skipped:].mean(1))


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2"])
def test_names_of_a_bare_state_dict_become_those_on_disk(name: str, tmp_path: Path, build: Any, save: Any) -> None:
    found = family(name)
    assert found.adapt is not None
    model = build(found.architecture, name)
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    adapted = found.adapt(open_checkpoint(tmp_path / "state.safetensors"))
    expected = load_file(save(model, tmp_path / "whole") / "model.safetensors")
    assert set(adapted) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(adapted[key], tensor)


@pytest.mark.parametrize("name", FAMILIES)
def test_adapting_stock_names_changes_nothing(name: str, tmp_path: Path, build: Any, save: Any) -> None:
    found = family(name)
    model = build(found.architecture or found.encoder_class, name) if name != "clip" else build("CLIPModel", name)
    checkpoint = open_checkpoint(save(model, tmp_path / "whole"))
    assert found.adapt is None or found.adapt(checkpoint) is checkpoint


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_names_repeat_an_encoder_tensor(name: str, build: Any) -> None:
    found = family(name)
    if found.tied:
        state = build(found.encoder_class, name).state_dict()
        for alias, original in found.tied.items():
            assert state[alias].data_ptr() == state[original].data_ptr()
