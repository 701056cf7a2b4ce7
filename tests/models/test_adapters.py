"""Experts that are adapters, end to end: merged, aligned and fitted as the full models that they make."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.berts import HEADS
from tests.models.making import TASKS, batch_for, build, save, stock

import orthomerge as om
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.models.experts import Experts
from orthomerge.models.families import family
from orthomerge.models.skeleton import quiet

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


def save_adapter(classifier: Any, folder: Path, **options: Any) -> None:
    """An adapter with random factors and head; and beside it, as FOLDER-full, the full model that it makes."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(**{"modules_to_save": ["classifier"], **options})
        adapted: Any = peft.get_peft_model(copy.deepcopy(classifier), config)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.data = (0.05 if "lora" in name else 0.3) * torch.randn(parameter.shape)
        adapted.save_pretrained(str(folder), save_embedding_layers=False)
        adapted.merge_and_unload().save_pretrained(f"{folder}-full")


def bert(base: Path, labels: int) -> Any:
    with quiet():
        from transformers import BertForSequenceClassification

        torch.manual_seed(labels)  # of the adapter too
        return BertForSequenceClassification.from_pretrained(base, num_labels=labels)


@pytest.fixture(scope="module")
def folder(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TASK: adapters; TASK-full: the models that they make."""
    place = tmp_path_factory.mktemp("adapters")
    for task, labels in HEADS.items():
        save_adapter(bert(berts / "base", labels), place / task, **OPTIONS[task])
    return place


def thin_and_full(folder: Path, base: Path, tasks: Iterable[str], **options: Any) -> list[Experts]:
    """The experts as adapters and as full models."""
    return [om.open({task: f"{folder / task}{kind}" for task in tasks}, base=base, **options) for kind in ("", "-full")]


def same_logits(models: list[om.Model], batch: dict[str, torch.Tensor], tolerance: float) -> None:
    with torch.no_grad():
        ours, theirs = (model.module("cpu")(**batch) for model in models)
    for task in ours:
        torch.testing.assert_close(ours[task], theirs[task], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options", [{"bias": "lora_only", "target_modules": ATTENTION}, {"target_modules": ["word_embeddings"]}]
)
def test_adapters_of_more_than_linear_layers(options: dict[str, Any], berts: Path, tmp_path: Path) -> None:
    save_adapter(bert(berts / "base", 2), tmp_path / "odd", **options)
    pair = thin_and_full(tmp_path, berts / "base", ["odd"], labels={"odd": ["no", "yes"]})
    same_logits([om.merge(experts, "average") for experts in pair], BATCH, 1e-5)


def test_the_config_beside_an_adapter_is_used(berts: Path, folder: Path, tmp_path: Path) -> None:
    """`orthomerge finetune --mode lora` writes the classifier's config too: labels, and how features are read."""
    shutil.copytree(folder / "two", tmp_path / "two")
    head = om.open({"two": tmp_path / "two"}, base=berts / "base").heads["two"]
    assert (head.labels, head.pooling) == (("LABEL_0", "LABEL_1"), "pooler")
    config = {"id2label": {"0": "no", "1": "yes"}, "orthomerge": {"pooling": "mean"}}
    (tmp_path / "two/config.json").write_text(json.dumps(config))
    head = om.open({"two": tmp_path / "two"}, base=berts / "base").heads["two"]
    assert (head.labels, head.pooling) == (("no", "yes"), "mean")
    with pytest.raises(RecipeError, match="an adapter needs the model that the experts were fine-tuned from"):
        om.merge({"two": tmp_path / "two"}, "average")


def test_an_adapter_with_nan_is_refused(berts: Path, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "two/adapter_model.safetensors")
    shutil.copytree(folder / "two", tmp_path / "bad")
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key][3, 1] = float("nan")
    save_file(tensors, tmp_path / "bad/adapter_model.safetensors")
    model = om.merge({"two": tmp_path / "bad"}, "task_arithmetic", base=berts / "base")
    with pytest.raises(NumericalError, match="holds NaN or infinity"):
        model.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["realign", "regmean"])
def test_fitted_as_full_experts_are(method: str, folder: Path, berts: Path, tables: Path) -> None:
    options: dict[str, Any] = {"steps": 4, "look": 2, "batch": 4} if method == "realign" else {}
    data = {task: tables / f"{task}.csv" for task in HEADS}
    labels = {task: [f"{task}-{number}" for number in range(count)] for task, count in HEADS.items()}
    pair = thin_and_full(folder, berts / "base", HEADS, labels=labels)
    fitted = [om.merge(experts, method, data=data, device="cpu", limit=24, **options) for experts in pair]
    same_logits(fitted, BATCH, 1e-2)


def test_lora_adapters_of_images_are_experts(tmp_path: Path) -> None:
    """Modules of a ViT have other names than the tensors that transformers saves."""
    base = build("ViTForImageClassification", "vit")
    save(base, tmp_path / "base")
    for seed, task in enumerate(TASKS):
        torch.manual_seed(seed)
        save_adapter(base, tmp_path / task, r=3, lora_alpha=5, target_modules=["q_proj", "fc1"])
    pair, batch = thin_and_full(tmp_path, tmp_path / "base", TASKS), batch_for(family("vit"), base.config)
    same_logits([om.merge(experts, "ties", density=0.9) for experts in pair], batch, 1e-4)
    for experts in pair:
        with torch.no_grad():
            source = experts.sources["one"].module("cpu")(**batch)["one"]  # the expert itself
            torch.testing.assert_close(source, stock(tmp_path / "one-full")(**batch).logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save(build("BertForSequenceClassification", "bert"), tmp_path / "base")
    other = build("DistilBertForSequenceClassification", "distilbert")
    save_adapter(other, tmp_path / "adapter", target_modules=["q_lin"])
    with pytest.raises(IncompatibleError, match="neither encoder nor head"):
        om.merge({"x": tmp_path / "adapter"}, "average", base=tmp_path / "base")
