"""Joint training: one encoder, a head for each task."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tuning.conftest import PROCESSORS, Reports

from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.data.task import Examples, Task
from orthomerge.tuning.finetune import finetune_jointly
from orthomerge.tuning.settings import Tuning

QUICK: dict[str, Any] = {"epochs": 3.0, "batch": 16, "lr": 3e-3, "head_lr": 1e-2, "device": "cpu"}


@pytest.fixture
def tasks(levels: Task) -> dict[str, Task]:
    """Bright or dark, and the same images with labels of three kinds, one of which never comes."""
    part = levels["train"]
    turned = Examples(part.inputs[:40], None if part.labels is None else 2 - 2 * part.labels[:40], "train")
    return {"two": levels, "three": Task("whatever", ("bright", "never", "dark"), "image", {"train": turned})}


def test_heads_differ_and_the_encoder_is_one(bases: Path, tasks: dict[str, Task], tmp_path: Path) -> None:
    reports = Reports()
    options: dict[str, Any] = {"base": bases / "vit", "out_root": tmp_path / "mtl", "processor": PROCESSORS["image"]}
    metrics = finetune_jointly(tasks, settings=Tuning(**QUICK), progress=reports, **options)
    assert sorted(path.name for path in (tmp_path / "mtl").iterdir()) == ["three", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["mtl"]
    assert metrics["two"]["val_accuracy"] > 0.85
    assert metrics["three"]["train_accuracy"] > 0.7
    assert "val_accuracy" not in metrics["three"]
    assert reports.lines[-1].startswith("joint, ")
    assert reports.lines[-1].endswith(f"val_accuracy {metrics['two']['val_accuracy']:.4g}")
    # 96 / 16 and 40 / 16 batches an epoch.
    assert metrics["two"]["steps"] == metrics["three"]["steps"] == 3 * (6 + 3)

    weights = {name: load_file(tmp_path / "mtl" / name / "model.safetensors") for name in tasks}
    heads = {name: weights[name].pop("classifier.weight") for name in tasks}
    assert {name: tuple(head.shape) for name, head in heads.items()} == {"two": (2, 32), "three": (3, 32)}
    for one in weights.values():
        del one["classifier.bias"]
    assert weights["two"].keys() == weights["three"].keys()
    assert all(torch.equal(weights["two"][name], weights["three"][name]) for name in weights["two"])

    config = json.loads((tmp_path / "mtl" / "three" / "config.json").read_text())
    assert config["id2label"] == {"0": "bright", "1": "never", "2": "dark"}
    assert (config["orthomerge"]["task"], config["orthomerge"]["mode"]) == ("three", "multitask")


def test_refusals(bases: Path, tasks: dict[str, Task], tmp_path: Path) -> None:
    options: dict[str, Any] = {"base": bases / "vit", "out_root": tmp_path / "mtl", "processor": PROCESSORS["image"]}
    with pytest.raises(RecipeError, match="joint training must have mode full or head_first, got 'lora'"):
        finetune_jointly(tasks, settings=Tuning(mode="lora"), **options)
    with pytest.raises(RecipeError, match="joint training needs at least one task, got none"):
        finetune_jointly({}, settings=Tuning(), **options)
    with pytest.raises(RecipeError, match=r"name must be the name of a folder, got '../x'; rename the task"):
        finetune_jointly({"../x": tasks["two"]}, settings=Tuning(), **options)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mtl" / "two").mkdir(parents=True)
    (tmp_path / "mtl" / "two" / "diary.txt").write_text("dear diary")
    with pytest.raises(OutputError, match="exists already"):
        finetune_jointly(tasks, settings=Tuning(**QUICK), **options)
