"""The table of families, and choosing from it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.models.families import FAMILIES, family, family_for, generic


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_loads_and_bears_its_name(name: str) -> None:
    found = family(name)
    assert found.name == name
    assert found.model_types
    assert found.encoder_class
    assert found.poolings
    assert (found.architecture is None) == (name in ("t5_encoder", "clip"))


def test_nothing_heavy_is_imported() -> None:
    names = ", ".join(f"orthomerge.models.{name}" for name in ("families", "experts", "saved", "writing", "inspection"))
    heavy = "{'torch', 'transformers', 'sklearn', 'huggingface_hub'}"
    code = f"import sys, {names}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(RecipeError, match="unknown model family 'deberta-v2'; did you mean 'deberta_v2'"):
        family("deberta-v2")


def test_generic_must_be_described() -> None:
    with pytest.raises(RecipeError, match="'generic' must be described: give `encoder_prefix`"):
        family("generic")


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


def test_unknown_model_type_shows_the_way_out() -> None:
    with pytest.raises(RecipeError, match=r"'swin' \(known: bert, .*\); .* `family: generic` in the recipe"):
        family_for("swin", [])
    with pytest.raises(RecipeError, match=r"'xlm_roberta' \(did you mean 'xlm-roberta'\?\); for any other"):
        family_for("xlm_roberta", [])


def test_generic() -> None:
    found = generic("backbone", ["head.dense", "head.out"], "relu")
    assert found.prefix == "backbone."
    assert found.head is not None
    assert found.head.parts() == {
        "hidden.weight": "head.dense.weight",
        "hidden.bias": "head.dense.bias",
        "weight": "head.out.weight",
        "bias": "head.out.bias",
    }
    assert generic("net.").prefix == "net."
    assert generic("").prefix == ""
    assert generic("").head is None
    features = torch.ones(2, 3)
    assert found.features(lambda x: x, {"x": features}, "output") is features


@pytest.mark.parametrize(
    ("layers", "activation", "match"),
    [
        (["a", "b", "c"], "relu", "one or two layers, got 3: a, b, c"),
        (["a", "b"], None, "needs an activation between them.*got 2 layers and activation none"),
        (["a"], "tanh", "got 1 layers and activation tanh"),
        (["a", "b"], "rely", "unknown activation 'rely'; did you mean 'relu'"),
    ],
)
def test_generic_refuses_impossible_heads(layers: list[str], activation: Any, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        generic("net", layers, activation)


def test_generic_encoder_must_return_a_tensor() -> None:
    with pytest.raises(RecipeError, match="must return its features as one tensor, got dict"):
        generic("").features(dict, {}, "output")
