"""Names of older and other writers; open_clip's against the weights of a CLIP of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.making import build, nudged, save, tensors_of, write_clip

import orthomerge as om
from orthomerge.core.errors import CheckpointError, IncompatibleError
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.families import family
from orthomerge.models.names import vision_names


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
    plain = opened(tmp_path, "a.LayerNorm.gamma")
    aliases = {"b.LayerNorm.gamma": "a.LayerNorm.gamma"}
    adapted = family("bert").adapted(Checkpoint(plain.path, plain.entries, aliases=aliases))
    assert adapted.aliases == {"b.LayerNorm.weight": "a.LayerNorm.weight"}
    assert torch.equal(adapted["b.LayerNorm.weight"], plain["a.LayerNorm.gamma"])


def test_both_old_and_new_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"both 'LayerNorm\.\w+' and .* two names of 'LayerNorm.weight'"):
        family("bert").adapted(opened(tmp_path, "LayerNorm.gamma", "LayerNorm.weight"))


@pytest.mark.parametrize("name", ["clip", "clip_classifier"])
def test_bare_vision_model_of_transformers_5(name: str, tmp_path: Path) -> None:
    bare = ("embeddings.class_embedding", "encoder.layers.0.mlp.fc1.bias", "pre_layrnorm.bias")
    assert set(family(name).adapted(opened(tmp_path, *bare))) == {f"vision_model.{each}" for each in bare}


def test_deberta_with_another_activation_is_refused(tmp_path: Path) -> None:
    adapt = family("deberta_v2").adapted
    plain = opened(tmp_path, "deberta.x")
    assert set(adapt(Checkpoint(plain.path, plain.entries, {"pooler_hidden_act": "gelu"}))) == {"deberta.x"}
    with pytest.raises(IncompatibleError, match=r"'pooler_hidden_act' in a DeBERTa-v2 .* must be 'gelu', got 'tanh'"):
        adapt(Checkpoint(plain.path, plain.entries, {"pooler_hidden_act": "tanh"}))


# open_clip

# The text side of an image encoder as the papers publish it: the transformer deleted, the rest left.
TEXT = ("positional_embedding", "text_projection", "logit_scale", "token_embedding.weight", "ln_final.weight")
LAYER = {"attn.out_proj": "self_attn.out_proj", "ln_1": "layer_norm1", "ln_2": "layer_norm2"}
LAYER |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}


def open_clip_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other direction, written by hand: a CLIP of transformers under the names of open_clip."""
    vision = "vision_model."
    renamed = {
        "class_embedding": tensors[f"{vision}embeddings.class_embedding"],
        "positional_embedding": tensors[f"{vision}embeddings.position_embedding.weight"],
        "conv1.weight": tensors[f"{vision}embeddings.patch_embedding.weight"],
        "proj": tensors["visual_projection.weight"].T.contiguous(),
    }
    for part in ("weight", "bias"):
        renamed[f"ln_pre.{part}"] = tensors[f"{vision}pre_layrnorm.{part}"]
        renamed[f"ln_post.{part}"] = tensors[f"{vision}post_layernorm.{part}"]
        for layer in (0, 1):
            here, there = f"transformer.resblocks.{layer}.", f"{vision}encoder.layers.{layer}."
            fused = [tensors[f"{there}self_attn.{which}_proj.{part}"] for which in ("q", "k", "v")]
            renamed[f"{here}attn.in_proj_{part}"] = torch.cat(fused)
            renamed |= {f"{here}{ours}.{part}": tensors[f"{there}{theirs}.{part}"] for ours, theirs in LAYER.items()}
    return renamed


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(save(build("CLIPModel", "clip"), tmp_path / "clip") / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("vis")}


@pytest.mark.parametrize("outer", [None, "", "model.", "module.model.", "image_encoder.model."])
def test_values_come_back_under_stock_names(
    outer: str | None, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """Of a tower alone, and of one beside what is left of the text side."""
    prefix = "" if outer is None else f"{outer}visual."
    tensors = {prefix + name: tensor for name, tensor in open_clip_names(expected).items()}
    if outer is not None:
        tensors |= {outer + name: torch.ones(3) for name in TEXT}
        tensors |= {f"{outer}transformer.resblocks.0.attn.in_proj_weight": torch.ones(3)}
    save_file(tensors, tmp_path / "tower.safetensors")
    adapted = vision_names(open_checkpoint(tmp_path / "tower.safetensors"))
    assert set(adapted) == set(expected)
    for name, tensor in expected.items():
        assert adapted.spec(name).shape == tensor.shape
        assert torch.equal(adapted[name], tensor), name


def test_other_towers(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """They are refused; what is neither vision nor text keeps its name, for others to refuse."""
    assert {family(name).adapt for name in ("clip", "clip_classifier")} == {vision_names}
    tensors = {f"visual.{name}": tensor for name, tensor in open_clip_names(expected).items()}
    two = tensors | {f"teacher.{name}": tensor.clone() for name, tensor in tensors.items()}
    unknown = tensors | {"visual.transformer.resblocks.0.ls_1.gamma": torch.ones(3)}
    for other, match in ((unknown, "no place for 'visual.transformer.resblocks.0.ls_1.gamma'"), (two, "got several: ")):
        save_file(other, tmp_path / "t.safetensors")
        with pytest.raises(CheckpointError, match=re.escape(match)):
            vision_names(open_checkpoint(tmp_path / "t.safetensors"))
    save_file(tensors | {"classification_head.weight": torch.ones(3)}, tmp_path / "t.safetensors")
    adapted = vision_names(open_checkpoint(tmp_path / "t.safetensors"))
    assert set(adapted) - set(expected) == {"classification_head.weight"}


def test_a_pickled_whole_open_clip_model_is_an_expert(tmp_path: Path) -> None:
    """The format in which the papers' CLIP experts are published, on a base in Hugging Face format."""
    write_clip(tmp_path / "base")
    expected = nudged(build("CLIPModel", "clip"), 3).state_dict()
    module = torch.nn.Module()
    for key, tensor in open_clip_names(dict(expected)).items():
        holder = module
        *path, last = key.split(".")
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, torch.nn.Module())
            holder = getattr(holder, part)
        holder.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    torch.save(module, tmp_path / "pets.pt")
    experts = om.open([tmp_path / "pets.pt"], base=tmp_path / "base", heads={"pets": {"classes": ("cat", "dog")}})
    for key, tensor in tensors_of(om.merge(experts, "average")).items():
        torch.testing.assert_close(tensor, expected[key].reshape(-1), rtol=1e-5, atol=1e-6)
