"""Experts that are adapters, end to end: merged, aligned and fitted as the full models that they make."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.aligning import HEADS, write_tables

from orthomerge.api.load import load
from orthomerge.core.errors import NumericalError
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.experts import open_experts
from orthomerge.models.load import quiet
from orthomerge.models.opening import Expert
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Align, Fit

BATCH = {"input_ids": torch.randint(5, 90, (6, 9), generator=torch.Generator().manual_seed(7))}
ATTENTION = ["query", "value"]
# Each expert in its own way: rank, scale and layers differ.
OPTIONS: dict[str, dict[str, Any]] = {
    "two": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION},
    "three": {"r": 2, "lora_alpha": 5, "target_modules": ["query", "key"], "use_rslora": True},
    "five": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["value"],
        "rank_pattern": {"layer.1.attention.self.value": 4},
        "alpha_pattern": {"layer.0.attention.self.value": 3},
    },
}


def classifier(base: Path, labels: int) -> Any:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(base, num_labels=labels)


def save_adapter(base: Path, folder: Path, labels: int, *, merged: Path | None = None, **options: Any) -> None:
    """An adapter with random factors and head; and, if asked for, the full model that it makes."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(labels)
        adapted: Any = get_peft_model(
            classifier(base, labels), LoraConfig(**{"modules_to_save": ["classifier"], **options})
        )
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.data = (0.05 if "lora" in name else 0.3) * torch.randn(parameter.shape)
        adapted.save_pretrained(str(folder), save_embedding_layers=False)
        if merged is not None:
            adapted.merge_and_unload().save_pretrained(merged)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "adapter-cache"))


@pytest.fixture(scope="module")
def folder(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TASK: adapters; TASK-full: the models that they make; TASK.csv: inputs."""
    place = tmp_path_factory.mktemp("adapters")
    for task, labels in HEADS.items():
        save_adapter(berts / "base", place / task, labels, merged=place / f"{task}-full", **OPTIONS[task])
    return write_tables(place)


@pytest.fixture
def recipe(berts: Path, folder: Path) -> Recipe:
    experts: dict[str, Expert | str] = {
        task: Expert(str(folder / task), labels=tuple(f"{task}-{number}" for number in range(labels)))
        for task, labels in HEADS.items()
    }
    return Recipe(experts, base=str(berts / "base"), method="task_arithmetic", parameters={"scale": 0.7})


def full(recipe: Recipe) -> Recipe:
    """The same experts as full models."""
    return replace(
        recipe, experts={task: replace(given, path=f"{given.path}-full") for task, given in recipe.tasks.items()}
    )


def logits(out: Path, task: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = load(out).module(device="cpu")(**BATCH)[task]
        return logits


def test_vision(tmp_path: Path) -> None:
    """Modules of a ViT have other names than the tensors that transformers saves."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model
        from transformers import ViTConfig, ViTForImageClassification, ViTModel

        sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = ViTConfig(**sizes, intermediate_size=24, image_size=8, patch_size=4, num_labels=3)
        ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "base")
        torch.manual_seed(0)
        model = ViTForImageClassification.from_pretrained(tmp_path / "base", num_labels=3)
        lora = LoraConfig(r=2, target_modules=["q_proj", "fc1"], modules_to_save=["classifier"])
        adapted: Any = get_peft_model(model, lora)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = 0.1 * torch.randn(parameter.shape)
        adapted.save_pretrained(str(tmp_path / "a"))
        recipe = Recipe({"a": str(tmp_path / "a")}, base=str(tmp_path / "base"), method="average")
        write(recipe, out=tmp_path / "model")
    pixels = {"pixel_values": torch.randn(3, 3, 8, 8)}
    with torch.no_grad():
        expected = adapted.eval().base_model.model.vit(**pixels).last_hidden_state[:, 0]
        encoder, family = load(tmp_path / "model").encoder.runner("cls")
        torch.testing.assert_close(family.features(encoder, pixels, "cls"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"bias": "lora_only", "target_modules": ATTENTION}, {"target_modules": ["word_embeddings"]}]
)
def test_adapters_of_more_than_linear_layers(
    options: dict[str, Any], recipe: Recipe, berts: Path, tmp_path: Path
) -> None:
    save_adapter(berts / "base", tmp_path / "odd", 2, merged=tmp_path / "odd-full", **options)
    given = Recipe({"two": Expert(str(tmp_path / "odd"))}, base=recipe.base, method="average")
    for name, one in {"thin": given, "full": full(given)}.items():
        write(one, out=tmp_path / name)
    ours, theirs = (logits(tmp_path / name, "two") for name in ("thin", "full"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_lies_beside_an_adapter_is_believed(berts: Path, folder: Path, tmp_path: Path) -> None:
    """`orthomerge finetune --mode lora` writes the classifier's config too: labels, and how features are read."""
    shutil.copytree(folder / "two", tmp_path / "two")
    config = {"id2label": {"0": "no", "1": "yes"}, "orthomerge": {"pooling": "mean"}}
    (tmp_path / "two/config.json").write_text(json.dumps(config))
    recipe = Recipe({"two": str(tmp_path / "two")}, base=str(berts / "base"), method="average")
    head = open_experts(recipe.opening).heads["two"]
    assert (head.labels, head.pooling) == (("no", "yes"), "mean")
    (tmp_path / "two/config.json").unlink()
    head = open_experts(recipe.opening).heads["two"]
    assert (head.labels, head.pooling) == (("LABEL_0", "LABEL_1"), "pooler")


def test_numbers_that_are_none(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "two/adapter_model.safetensors")
    shutil.copytree(folder / "two", tmp_path / "bad")
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key][3, 1] = float("nan")
    save_file(tensors, tmp_path / "bad/adapter_model.safetensors")
    given = replace(recipe, experts={**recipe.experts, "two": str(tmp_path / "bad")})
    with pytest.raises(NumericalError, match="holds NaN or infinity"):
        write(given, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_knots_of_adapters_and_of_the_models_that_they_make(recipe: Recipe, tmp_path: Path) -> None:
    recipe = replace(recipe, method="knots", parameters={"merger": "task_arithmetic", "scale": 0.7})
    plain = replace(recipe, method="task_arithmetic", parameters={"scale": 0.7})
    for name, given in {"thin": recipe, "dense": full(recipe), "plain": plain}.items():
        write(given, out=tmp_path / name)
    names = ("thin", "dense", "plain")
    thin, dense, expected = (open_checkpoint(tmp_path / name / "encoder.safetensors") for name in names)
    for key in expected:
        torch.testing.assert_close(thin[key], expected[key], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dense[key], expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["ties", "dare", "knots"])
def test_aligned_as_full_experts_are(method: str, recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    data = {task: str(folder / f"{task}.csv") for task in HEADS}
    given = replace(recipe, method=method, parameters={}, align=Align(data, "ridge"))
    if method == "knots":  # element by element, noise of rounding in the full models would count in the trim
        given = replace(given, parameters={"merger": "task_arithmetic"})
    for name, one in {"thin": given, "full": full(given)}.items():
        manifest = write(one, out=tmp_path / name).manifest
        assert manifest["alignment"]["aligner"] == "ridge"
    for task in HEADS:
        ours, theirs = (logits(tmp_path / name, task) for name in ("thin", "full"))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("method", "options"),
    [("realign", {"steps": 4, "look": 2, "batch": 4}), ("moma", {"steps": 4, "look": 2, "batch": 4}), ("regmean", {})],
)
def test_fitted_as_full_experts_are(
    method: str, options: dict[str, Any], recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    fit = Fit({task: str(folder / f"{task}.csv") for task in HEADS}, device="cpu", limit=24)
    given = replace(recipe, method=method, parameters=options, fit=fit)
    for name, one in {"thin": given, "full": full(given)}.items():
        write(one, out=tmp_path / name)
    for task in HEADS:
        ours, theirs = (logits(tmp_path / name, task) for name in ("thin", "full"))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
