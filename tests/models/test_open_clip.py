"""open_clip's names against the weights of a CLIP of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.making import build, save

from orthomerge.core.errors import CheckpointError
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.families import family
from orthomerge.models.names import vision_names

if TYPE_CHECKING:
    from pathlib import Path

# The text side of an image encoder as the papers publish it: the transformer deleted, the rest left.
TEXT = ("positional_embedding", "text_projection", "logit_scale", "token_embedding.weight", "ln_final.weight")


def open_clip_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other direction, written by hand: a CLIP of transformers under the names of open_clip."""
    vision = "vision_model."
    found = {
        "class_embedding": tensors[f"{vision}embeddings.class_embedding"],
        "positional_embedding": tensors[f"{vision}embeddings.position_embedding.weight"],
        "conv1.weight": tensors[f"{vision}embeddings.patch_embedding.weight"],
        "proj": tensors["visual_projection.weight"].T.contiguous(),
    }
    for part in ("weight", "bias"):
        found[f"ln_pre.{part}"] = tensors[f"{vision}pre_layrnorm.{part}"]
        found[f"ln_post.{part}"] = tensors[f"{vision}post_layernorm.{part}"]
        for layer in (0, 1):
            here, there = f"transformer.resblocks.{layer}.", f"{vision}encoder.layers.{layer}."
            fused = [tensors[f"{there}self_attn.{which}_proj.{part}"] for which in ("q", "k", "v")]
            found[f"{here}attn.in_proj_{part}"] = torch.cat(fused)
            found[f"{here}attn.out_proj.{part}"] = tensors[f"{there}self_attn.out_proj.{part}"]
            found[f"{here}ln_1.{part}"] = tensors[f"{there}layer_norm1.{part}"]
            found[f"{here}ln_2.{part}"] = tensors[f"{there}layer_norm2.{part}"]
            found[f"{here}mlp.c_fc.{part}"] = tensors[f"{there}mlp.fc1.{part}"]
            found[f"{here}mlp.c_proj.{part}"] = tensors[f"{there}mlp.fc2.{part}"]
    return found


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, torch.Tensor]:
    save(build("CLIPModel", "clip"), tmp_path / "clip")
    tensors = load_file(tmp_path / "clip" / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("vis")}


@pytest.mark.parametrize(
    "prefix", ["", "visual.", "model.visual.", "module.model.visual.", "image_encoder.model.visual."]
)
def test_values_come_back_under_stock_names(prefix: str, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = {prefix + name: tensor for name, tensor in open_clip_names(expected).items()}
    if prefix:
        outer = prefix.removesuffix("visual.")
        tensors |= {outer + name: torch.ones(3) for name in TEXT}
        tensors |= {f"{outer}transformer.resblocks.0.attn.in_proj_weight": torch.ones(3)}
    save_file(tensors, tmp_path / "tower.safetensors")
    found = vision_names(open_checkpoint(tmp_path / "tower.safetensors"))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found.spec(name).shape == tensor.shape
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["clip", "clip_classifier"])
def test_families_adapt_it(name: str, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    save_file(
        {f"model.visual.{key}": tensor for key, tensor in open_clip_names(expected).items()},
        tmp_path / "t.safetensors",
    )
    adapt = family(name).adapt
    assert adapt is not None
    assert set(adapt(open_checkpoint(tmp_path / "t.safetensors"))) == set(expected)


def test_other_towers_are_refused(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = {f"visual.{name}": tensor for name, tensor in open_clip_names(expected).items()}
    save_file(tensors | {"visual.transformer.resblocks.0.ls_1.gamma": torch.ones(3)}, tmp_path / "t.safetensors")
    with pytest.raises(CheckpointError, match=r"no place for 'visual.transformer.resblocks.0.ls_1.gamma'"):
        vision_names(open_checkpoint(tmp_path / "t.safetensors"))
    two = tensors | {f"teacher.{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file(two, tmp_path / "t.safetensors")
    with pytest.raises(CheckpointError, match="got several: "):
        vision_names(open_checkpoint(tmp_path / "t.safetensors"))


def test_what_is_neither_vision_nor_text_keeps_its_name(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = {f"visual.{name}": tensor for name, tensor in open_clip_names(expected).items()}
    save_file(tensors | {"classification_head.weight": torch.ones(3)}, tmp_path / "t.safetensors")
    found = vision_names(open_checkpoint(tmp_path / "t.safetensors"))
    assert set(found) - set(expected) == {"classification_head.weight"}
