"""The table of families, and choosing from it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.models.families import FAMILIES, family, family_for, generic


def test_every_row_bears_its_name() -> None:
    for name, row in FAMILIES.items():
        assert family(name) is row
        assert (row.name, bool(row.model_types and row.encoder_class and row.poolings)) == (name, True)


def test_nothing_heavy_is_imported() -> None:
    names = ", ".join(f"orthomerge.models.{name}" for name in ("families", "experts", "saved", "writing", "inspection"))
    heavy = "{'torch', 'transformers', 'sklearn', 'huggingface_hub'}"
    code = f"import sys, {names}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("deberta-v2", "unknown model family 'deberta-v2'; did you mean 'deberta_v2'"),
        ("generic", "'generic' must be described: give `encoder_prefix`"),
    ],
)
def test_unknown_families(name: str, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        family(name)


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
    assert [generic(prefix).prefix for prefix in ("net.", "net", "")] == ["net.", "net.", ""]
    assert generic("").head is None
    features = torch.ones(2, 3)
    assert generic("").features(lambda x: x, {"x": features}, "output") is features


def test_generic_encoder_must_return_a_tensor() -> None:
    with pytest.raises(RecipeError, match="must return its features as one tensor, got dict"):
        generic("").features(dict, {}, "output")
