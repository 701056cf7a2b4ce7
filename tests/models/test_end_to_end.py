"""Checkpoints of other writers through a merge: zero-shot CLIP, adapters, open_clip, older names, tied weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.making import batch_for, build, nudged, save, stock, tensors_of, write_tokenizer

import orthomerge as om
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.models.families import family
from orthomerge.models.skeleton import quiet

PETS: Any = {"pets": {"classes": ("cat", "dog")}}


def test_clip_with_heads_from_class_names(tmp_path: Path) -> None:
    base = build("CLIPModel", "clip")
    save(base, tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    for seed, task in enumerate(("pets", "bees")):
        with quiet():
            import transformers

            tower = transformers.CLIPVisionModel(base.config.vision_config)
            tower.load_state_dict(nudged(base, seed).vision_model.state_dict())
        save(tower, tmp_path / task)
    heads: Any = {**PETS, "bees": {"classes": ("bee", "cat", "dog"), "templates": ("the {}",)}}
    experts = om.open({task: tmp_path / task for task in heads}, base=tmp_path / "base", heads=heads)
    om.merge(experts, "task_arithmetic", scale=0.0).save(tmp_path / "out")
    assert list(experts.parts.copied) == ["visual_projection.weight"]
    model = om.load(tmp_path / "out")
    images = batch_for(family("clip"), base.config)
    logits = model.module("cpu")(**images)
    with quiet(), torch.no_grad():
        from transformers import CLIPTokenizer

        tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "base")
        texts = tokenizer([f"the {name}" for name in ("bee", "cat", "dog")], padding=True, return_tensors="pt")
        expected = base(**images, **texts).logits_per_image
        torch.testing.assert_close(logits["bees"], expected, rtol=1e-4, atol=1e-4)
    assert logits["pets"].shape == (4, 2)
    assert not list((tmp_path / "out").rglob("config.json"))  # no stock class computes such a head
    with pytest.raises(RecipeError, match="no classifier that computes what 'clip' does"):
        om.export(model, tmp_path / "x", task="pets")


def test_lora_adapters_of_images_are_experts(tmp_path: Path) -> None:
    """Modules of a ViT have other names than the tensors that transformers saves; `test_adapters` has texts."""
    peft = pytest.importorskip("peft")
    row = family("vit")
    base = build(str(row.architecture), "vit")
    save(base, tmp_path / "base")
    for seed, task in enumerate(("one", "two")):
        torch.manual_seed(seed)
        targets = ["q_proj", "fc1"]
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, modules_to_save=["classifier"])
        adapted = peft.get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key or "modules_to_save" in key:
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
        adapted.save_pretrained(tmp_path / f"{task}-adapter")
        save(adapted.merge_and_unload(), tmp_path / task)
    batch = batch_for(row, base.config)
    logits = []
    for kind in ("-adapter", ""):
        experts = om.open({task: f"{tmp_path / task}{kind}" for task in ("one", "two")}, base=tmp_path / "base")
        logits.append(om.merge(experts, "ties", density=0.9).module("cpu")(**batch))
        source = experts.sources["one"].module("cpu")(**batch)["one"]  # the expert itself
        with torch.no_grad():
            torch.testing.assert_close(source, stock(tmp_path / "one")(**batch).logits, rtol=1e-4, atol=1e-4)
    for task in ("one", "two"):
        torch.testing.assert_close(logits[0][task], logits[1][task], rtol=1e-4, atol=1e-4)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save(build("BertForSequenceClassification", "bert"), tmp_path / "base")
    other = copy.deepcopy(build("DistilBertForSequenceClassification", "distilbert"))
    peft.get_peft_model(other, peft.LoraConfig(target_modules=["q_lin"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(IncompatibleError, match="neither encoder nor head"):
        om.merge({"x": tmp_path / "adapter"}, "average", base=tmp_path / "base")


def test_a_pickled_whole_open_clip_model_is_an_expert(tmp_path: Path) -> None:
    """The format in which the papers' CLIP experts are published, on a base in Hugging Face format."""
    from tests.models.test_open_clip import open_clip_names

    base = build("CLIPModel", "clip")
    save(base, tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    names = open_clip_names(dict(nudged(base, 3).state_dict()))
    module = torch.nn.Module()
    for key, tensor in names.items():
        holder = module
        *path, last = key.split(".")
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, torch.nn.Module())
            holder = getattr(holder, part)
        holder.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    torch.save(module, tmp_path / "pets.pt")
    experts = om.open([tmp_path / "pets.pt"], base=tmp_path / "base", heads=PETS)
    merged, expected = tensors_of(om.merge(experts, "average")), nudged(base, 3).state_dict()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[key].reshape(-1), rtol=1e-5, atol=1e-6)


def test_tied_weights_must_be_equal(tmp_path: Path) -> None:
    """A T5 that stores its embedding twice is fine as long as both copies are the same."""
    base = build("T5ForSequenceClassification", "t5")
    save(base, tmp_path / "base")
    save(nudged(base, 1), tmp_path / "one")
    path = tmp_path / "one" / "model.safetensors"
    tensors = load_file(path)
    twin = "transformer.encoder.embed_tokens.weight"
    save_file(tensors | {twin: tensors["transformer.shared.weight"].clone()}, path, metadata={"format": "pt"})
    experts = om.open({"one": tmp_path / "one"}, base=tmp_path / "base")
    om.merge(experts, "average")
    assert experts.parts.sources["one"].split.left_out == {twin: "tied to shared.weight"}
    save_file(tensors | {twin: tensors["transformer.shared.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(IncompatibleError, match=r"'transformer.encoder.embed_tokens.weight' and .* must be one tensor"):
        om.merge({"one": tmp_path / "one"}, "average", base=tmp_path / "base")
