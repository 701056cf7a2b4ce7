"""Every family from stock checkpoints through a merge to a stock classifier, and back to the same logits."""

from __future__ import annotations

import copy
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import orthomerge
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.models.families import FAMILIES, family
from orthomerge.models.load import quiet
from orthomerge.recipe import Expert, HeadNames, Recipe

if TYPE_CHECKING:
    from pathlib import Path

STOCK = [name for name in FAMILIES if family(name).architecture is not None]


def nudged(model: Any, seed: int) -> Any:
    """A copy whose weights differ a little, as a fine-tuned one's do."""
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return twin


def stock(folder: Path) -> Any:
    """Load as a user would; nothing may be missing or left over."""
    with quiet():
        import transformers

        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        auto = "AutoModelForImageClassification" if "Image" in name else "AutoModelForSequenceClassification"
        model, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == name
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("name", STOCK)
def test_merged_and_exported(name: str, tmp_path: Path, build: Any, save: Any, batch_for: Any) -> None:
    found = family(name)
    base = build(found.architecture, name)
    save(base, tmp_path / "base")
    experts = {task: nudged(base, seed) for seed, task in enumerate(("one", "two"))}
    for task, expert in experts.items():
        save(expert, tmp_path / task)
    given = Recipe(
        experts={task: str(tmp_path / task) for task in experts}, base=str(tmp_path / "base"), method="average"
    )
    orthomerge.merge(given, out=tmp_path / "out")
    model = orthomerge.load(tmp_path / "out")
    assert model.family.name == name
    batch = batch_for(found, base.config)
    merged = {key: value.clone() for key, value in base.state_dict().items()}
    for task in experts:
        orthomerge.export(tmp_path / "out", task, tmp_path / f"{task}-out")
        with torch.no_grad():
            logits = stock(tmp_path / f"{task}-out")(**batch).logits
            torch.testing.assert_close(model.logits(task, batch), logits, rtol=0, atol=1e-5)
        # By hand: the mean of all weights, except the head's, which is the expert's own.
        heads = found.head.names() if found.head else ()
        mean = {
            key: experts[task].state_dict()[key] if key in heads
            else sum(expert.state_dict()[key] for expert in experts.values()) / 2 if value.is_floating_point()
            else value
            for key, value in merged.items()
        }  # fmt: skip
        twin = copy.deepcopy(base)
        twin.load_state_dict(mean)
        with torch.no_grad():
            torch.testing.assert_close(logits, twin(**batch).logits, rtol=1e-4, atol=1e-4)


def test_clip_with_heads_from_class_names(tmp_path: Path, build: Any, save: Any, batch_for: Any) -> None:
    from tests.models.test_zero_shot import write_tokenizer

    base = build("CLIPModel", "clip")
    save(base, tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    for seed, task in enumerate(("pets", "bees")):
        expert = nudged(base, seed)
        with quiet():
            import transformers

            tower = transformers.CLIPVisionModel(base.config.vision_config)
            tower.load_state_dict(expert.vision_model.state_dict())
        save(tower, tmp_path / task)
    experts: dict[str, Expert | str] = {
        "pets": Expert(str(tmp_path / "pets"), head=HeadNames(classes=("cat", "dog"))),
        "bees": Expert(str(tmp_path / "bees"), head=HeadNames(classes=("bee", "cat", "dog"), templates=("the {}",))),
    }
    given = Recipe(experts=experts, base=str(tmp_path / "base"), method="task_arithmetic", parameters={"scale": 0.0})
    result = orthomerge.merge(given, out=tmp_path / "out")
    assert result.manifest["tensors"]["copied"] == ["visual_projection.weight"]
    model = orthomerge.load(tmp_path / "out")
    images = batch_for(family("clip"), base.config)
    with quiet(), torch.no_grad():
        from transformers import CLIPTokenizer

        tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "base")
        texts = tokenizer([f"the {name}" for name in ("bee", "cat", "dog")], padding=True, return_tensors="pt")
        expected = base(**images, **texts).logits_per_image
        torch.testing.assert_close(model.logits("bees", images), expected, rtol=1e-4, atol=1e-4)
    assert model.logits("pets", images).shape == (4, 2)
    with pytest.raises(RecipeError, match="no classifier that computes what 'clip' does"):
        orthomerge.export(tmp_path / "out", "pets", tmp_path / "x")


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_lora_adapters_are_experts(name: str, tmp_path: Path, build: Any, save: Any, batch_for: Any) -> None:
    peft = pytest.importorskip("peft")
    found = family(name)
    base = build(found.architecture, name)
    save(base, tmp_path / "base")
    for seed, task in enumerate(("one", "two")):
        torch.manual_seed(seed)
        targets = ["query", "value"] if name == "bert" else ["q_proj", "v_proj"]
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, modules_to_save=["classifier"])
        adapted = peft.get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key or "modules_to_save" in key:
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
        adapted.save_pretrained(tmp_path / f"{task}-adapter")
        save(adapted.merge_and_unload(), tmp_path / task)
    outputs = {}
    for kind in ("-adapter", ""):
        experts = {task: f"{tmp_path / task}{kind}" for task in ("one", "two")}
        given = Recipe(experts=experts, base=str(tmp_path / "base"), method="ties", parameters={"density": 0.9})
        orthomerge.merge(given, out=tmp_path / f"out{kind}")
        outputs[kind] = orthomerge.load(tmp_path / f"out{kind}")
    batch = batch_for(found, base.config)
    with torch.no_grad():
        for task in ("one", "two"):
            ours, full = (model.logits(task, batch) for model in outputs.values())
            torch.testing.assert_close(ours, full, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, build: Any, save: Any) -> None:
    peft = pytest.importorskip("peft")
    save(build("BertForSequenceClassification", "bert"), tmp_path / "base")
    other = copy.deepcopy(build("DistilBertForSequenceClassification", "distilbert"))
    peft.get_peft_model(other, peft.LoraConfig(target_modules=["q_lin"])).save_pretrained(tmp_path / "adapter")
    given = Recipe(experts={"x": str(tmp_path / "adapter")}, base=str(tmp_path / "base"), method="average")
    with pytest.raises(IncompatibleError, match="neither encoder nor head"):
        orthomerge.merge(given, out=tmp_path / "out")


def test_a_pickled_whole_open_clip_model_is_an_expert(tmp_path: Path, build: Any, save: Any) -> None:
    """The format in which the papers' CLIP experts are published, on a base in Hugging Face format."""
    from tests.models.test_open_clip import open_clip_names
    from tests.models.test_zero_shot import write_tokenizer

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
    experts: dict[str, Expert | str] = {
        "pets": Expert(str(tmp_path / "pets.pt"), head=HeadNames(classes=("cat", "dog")))
    }
    given = Recipe(experts=experts, base=str(tmp_path / "base"), method="average")
    orthomerge.merge(given, out=tmp_path / "out")
    merged = open_checkpoint(tmp_path / "out" / "encoder")
    expected = nudged(base, 3).state_dict()
    for key in merged:
        torch.testing.assert_close(merged[key], expected[key], rtol=1e-5, atol=1e-6)


def test_transformers_4_names_of_a_vision_tower(tmp_path: Path, build: Any, save: Any) -> None:
    """A `CLIPVisionModel` saved by transformers 4 keeps `vision_model.`; by 5 it does not. Both are the same expert."""
    from safetensors.torch import load_file, save_file
    from tests.models.test_zero_shot import write_tokenizer

    base = build("CLIPModel", "clip")
    save(base, tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    tower = build("CLIPVisionModel", "clip_vision", 5)
    save(tower, tmp_path / "five")
    shutil.copytree(tmp_path / "five", tmp_path / "four")
    names = load_file(tmp_path / "five" / "model.safetensors")
    old = {f"vision_model.{key}": value for key, value in names.items()}
    save_file(old, tmp_path / "four" / "model.safetensors", metadata={"format": "pt"})
    for version in ("four", "five"):
        expert = Expert(str(tmp_path / version), head=HeadNames(classes=("cat", "dog")))
        given = Recipe(experts={"x": expert}, base=str(tmp_path / "base"), method="average", check_base=False)
        orthomerge.merge(given, out=tmp_path / f"out-{version}")
    one, other = (open_checkpoint(tmp_path / f"out-{version}" / "encoder") for version in ("four", "five"))
    assert set(one) == set(other)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_tied_weights_must_be_equal(tmp_path: Path, build: Any, save: Any) -> None:
    """A T5 that stores its embedding twice is fine as long as both copies are the same."""
    from safetensors.torch import load_file, save_file

    base = build("T5ForSequenceClassification", "t5")
    save(base, tmp_path / "base")
    save(nudged(base, 1), tmp_path / "one")
    path = tmp_path / "one" / "model.safetensors"
    tensors = load_file(path)
    given = Recipe(experts={"one": str(tmp_path / "one")}, base=str(tmp_path / "base"), method="average")
    twin = "transformer.encoder.embed_tokens.weight"
    save_file(tensors | {twin: tensors["transformer.shared.weight"].clone()}, path, metadata={"format": "pt"})
    result = orthomerge.merge(given, out=tmp_path / "out")
    assert result.manifest["tensors"]["left_out"]["one"] == {twin: "tied to shared.weight"}
    save_file(tensors | {twin: tensors["transformer.shared.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(IncompatibleError, match=r"'transformer.encoder.embed_tokens.weight' and .* must be one tensor"):
        orthomerge.merge(given, out=tmp_path / "other")
