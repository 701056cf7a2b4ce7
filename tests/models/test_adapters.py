"""Experts that are adapters, end to end: merged, aligned and fitted as the full models that they make."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.berts import HEADS
from tests.models.making import batch_for, build, save, stock

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


def save_adapter(base: Path, folder: Path, labels: int, **options: Any) -> None:
    """An adapter with random factors and head; and beside it, as FOLDER-full, the full model that it makes."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model
        from transformers import BertForSequenceClassification

        torch.manual_seed(labels)
        classifier = BertForSequenceClassification.from_pretrained(base, num_labels=labels)
        adapted: Any = get_peft_model(classifier, LoraConfig(**{"modules_to_save": ["classifier"], **options}))
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.data = (0.05 if "lora" in name else 0.3) * torch.randn(parameter.shape)
        adapted.save_pretrained(str(folder), save_embedding_layers=False)
        adapted.merge_and_unload().save_pretrained(f"{folder}-full")


@pytest.fixture(scope="module")
def folder(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TASK: adapters; TASK-full: the models that they make."""
    place = tmp_path_factory.mktemp("adapters")
    for task, labels in HEADS.items():
        save_adapter(berts / "base", place / task, labels, **OPTIONS[task])
    return place


@pytest.fixture
def pair(berts: Path, folder: Path) -> tuple[Experts, Experts]:
    """The experts as adapters and as full models."""
    labels = {task: [f"{task}-{number}" for number in range(count)] for task, count in HEADS.items()}
    thin, full = (
        om.open({task: f"{folder / task}{kind}" for task in HEADS}, base=berts / "base", labels=labels)
        for kind in ("", "-full")
    )
    return thin, full


def same_logits(one: om.Model, other: om.Model, *, rtol: float, atol: float) -> None:
    with torch.no_grad():
        ours, theirs = one.module("cpu")(**BATCH), other.module("cpu")(**BATCH)
    for task in ours:
        torch.testing.assert_close(ours[task], theirs[task], rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "options", [{"bias": "lora_only", "target_modules": ATTENTION}, {"target_modules": ["word_embeddings"]}]
)
def test_adapters_of_more_than_linear_layers(options: dict[str, Any], berts: Path, tmp_path: Path) -> None:
    save_adapter(berts / "base", tmp_path / "odd", 2, **options)
    thin, full = (om.merge({"two": tmp_path / name}, "average", base=berts / "base") for name in ("odd", "odd-full"))
    same_logits(thin, full, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize(
    ("method", "options"),
    [("realign", {"steps": 4, "look": 2, "batch": 4}), ("regmean", {})],
)
def test_fitted_as_full_experts_are(
    method: str, options: dict[str, Any], pair: tuple[Experts, Experts], tables: Path
) -> None:
    data = {task: tables / f"{task}.csv" for task in HEADS}
    thin, full = (om.merge(experts, method, data=data, device="cpu", limit=24, **options) for experts in pair)
    same_logits(thin, full, rtol=1e-2, atol=1e-2)


def test_lora_adapters_of_images_are_experts(tmp_path: Path) -> None:
    """Modules of a ViT have other names than the tensors that transformers saves."""
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
