"""Families against the stock models of transformers that they describe; `test_family_values` has their classifiers."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from tests.models.making import batch_for, build, save

from orthomerge.core.errors import RecipeError
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.families import FAMILIES, family, family_for, generic
from orthomerge.models.heads import Head
from orthomerge.models.model_data import Encoder
from orthomerge.models.skeleton import encoder_config
from orthomerge.models.split import split_base
from orthomerge.models.tensors import FileTensors

# Stock models from which experts are made, or which people have lying around.
OTHERS = {
    "bert": ["BertModel", "BertForPreTraining", "BertForMaskedLM"],
    "roberta": ["RobertaModel", "RobertaForMaskedLM"],
    "xlm_roberta": ["XLMRobertaForMaskedLM"],
    "camembert": ["CamembertForMaskedLM"],
    "distilbert": ["DistilBertForMaskedLM"],
    "electra": ["ElectraForPreTraining", "ElectraForMaskedLM"],
    "deberta_v2": ["DebertaV2Model", "DebertaV2ForMaskedLM"],
    "t5": ["T5Model", "T5ForConditionalGeneration"],
    "t5_encoder": ["T5EncoderModel", "T5ForConditionalGeneration", "T5ForTokenClassification"],
    "vit": ["ViTModel", "ViTForMaskedImageModeling"],
    "deit": ["DeiTModel", "DeiTForImageClassificationWithTeacher", "DeiTForMaskedImageModeling"],
    "dinov2": ["Dinov2Model"],
    "clip": ["CLIPModel"],
    "clip_classifier": ["CLIPModel"],
}


def split_off(class_name: str, name: str, folder: Path) -> tuple[Encoder, dict[str, torch.Tensor]]:
    """The encoder of a stock model, and every other tensor."""
    checkpoint = open_checkpoint(save(build(class_name, "clip_vision" if "Vision" in class_name else name), folder))
    adapted = family(name).adapted(checkpoint)
    assert adapted.entries == checkpoint.entries or class_name.startswith("CLIPVision")  # stock names stay
    split = split_base(adapted.specs, family(name))
    assert split.unknown == ()
    tensors = FileTensors({key: (adapted, place) for key, place in split.names.items()})
    encoder = Encoder(family(name), encoder_config(checkpoint.config or {}, family(name)), tensors)
    return encoder, {place: adapted[place] for place in split.left_out}


@pytest.mark.parametrize(("name", "class_name"), [(name, cls) for name, classes in OTHERS.items() for cls in classes])
def test_other_stock_models_hold_the_same_encoder(name: str, class_name: str, tmp_path: Path) -> None:
    row = family(name)
    # Where there is no stock classifier, the encoder itself is the reference.
    whole, _ = split_off(row.architecture or row.encoder_class, name, tmp_path / "whole")
    other, _ = split_off(class_name, name, tmp_path / "other")
    assert other.tensors.specs
    for key in whole.tensors.specs.keys() ^ other.tensors.specs.keys():
        assert any(fnmatchcase(key, pattern) for pattern in row.optional), key


def test_t5_encoder_with_a_linear_head(tmp_path: Path) -> None:
    row, model = family("t5_encoder"), build("T5ForTokenClassification", "t5_encoder")
    batch = batch_for(row, model.config)
    encoder, tensors = split_off("T5ForTokenClassification", "t5_encoder", tmp_path)
    parts = {part: tensors[f"classifier.{part}"] for part in ("weight", "bias")}
    head = Head.of(parts, tuple("abcde"))
    with torch.no_grad():
        logits = head(row.features(encoder.module(), batch, "mean"))
        # The stock model classifies every token; a linear head and a mean can change places.
        per_token, mask = model(**batch).logits, batch["attention_mask"].unsqueeze(-1)
        torch.testing.assert_close(logits, (per_token * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-5)


TEXTS = [(name, 0) for name in FAMILIES if family(name).modality == "text" and name != "t5"]
IMAGES = [("vit", 1), ("deit", 2), ("dinov2", 1), ("clip_classifier", 1)]


@pytest.mark.parametrize(("name", "skipped"), [*TEXTS, *IMAGES])
def test_poolings_by_hand(name: str, skipped: int) -> None:
    """The first token, and the mean of words that are no padding or of patches."""
    row = family(name)
    encoder = build(row.encoder_class, "clip_vision" if name == "clip_classifier" else name)
    batch = batch_for(row, encoder.config)
    with torch.no_grad():
        hidden = encoder(**batch).last_hidden_state
        torch.testing.assert_close(row.features(encoder, batch, "cls"), hidden[:, 0])
        ends = batch["attention_mask"].sum(1) if row.modality == "text" else [skipped + 4] * 4  # four patches
        assert row.modality == "text" or hidden.shape[1] == skipped + 4
        expected = torch.stack([each[skipped:end].mean(0) for each, end in zip(hidden, ends, strict=True)])
        torch.testing.assert_close(row.features(encoder, batch, "mean"), expected)


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name).tied])
def test_tied_names_repeat_an_encoder_tensor(name: str) -> None:
    row = family(name)
    state = build(row.encoder_class, name).state_dict()
    assert all(state[alias].data_ptr() == state[original].data_ptr() for alias, original in row.tied.items())


# The table, and choosing from it


def test_nothing_heavy_is_imported() -> None:
    names = ", ".join(f"orthomerge.models.{name}" for name in ("families", "experts", "saved", "writing"))
    heavy = "{'torch', 'transformers', 'sklearn', 'huggingface_hub'}"
    code = f"import sys, {names}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("model_type", "keys", "name"),
    [
        ("bert", [], "bert"),
        ("xlm-roberta", [], "xlm_roberta"),
        ("deberta-v2", [], "deberta_v2"),
        ("clip", ["vision_model.post_layernorm.bias", "classifier.weight"], "clip_classifier"),
        ("clip", ["vision_model.post_layernorm.bias", "text_projection.weight"], "clip"),
        ("clip_vision_model", ["vision_model.post_layernorm.bias"], "clip"),
        ("t5", ["transformer.decoder.final_layer_norm.weight", "classification_head.dense.weight"], "t5"),
        ("t5", ["shared.weight", "decoder.final_layer_norm.weight", "lm_head.weight"], "t5"),
        ("t5", ["shared.weight", "decoder.final_layer_norm.weight", "classifier.weight"], "t5_encoder"),
        ("t5", ["module.shared.weight", "module.classifier.weight"], "t5_encoder"),
        ("t5", ["shared.weight", "encoder.final_layer_norm.weight"], "t5_encoder"),
    ],
)
def test_family_for(model_type: str, keys: list[str], name: str) -> None:
    assert family_for(model_type, iter(keys)).name == name


def test_what_is_unknown_shows_the_way_out() -> None:
    with pytest.raises(RecipeError, match="unknown model family 'deberta-v2'; did you mean 'deberta_v2'"):
        family("deberta-v2")
    with pytest.raises(RecipeError, match="'generic' must be described; give `encoder_prefix`"):
        family("generic")
    with pytest.raises(RecipeError, match=r"'swin' \(known: bert, .*\); .* `family: generic` in the recipe"):
        family_for("swin", [])
    with pytest.raises(RecipeError, match=r"'xlm_roberta' \(did you mean 'xlm-roberta'\?\); for any other"):
        family_for("xlm_roberta", [])


def test_generic() -> None:
    assert [generic(prefix).prefix for prefix in ("net.", "net", "")] == ["net.", "net.", ""]
    features = torch.ones(2, 3)
    assert generic("").features(lambda x: x, {"x": features}, "output") is features
    with pytest.raises(RecipeError, match="must return one tensor, got dict"):
        generic("").features(dict, {}, "output")
