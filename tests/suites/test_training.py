"""Trainings of a suite: what is there is kept, and errors come through."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from orthomerge.core.errors import OutputError
from orthomerge.data.task import Examples, Split, Task
from orthomerge.models.processing import PixelProcessor
from orthomerge.suites.building import experts_root, make_both, make_experts, pretrained_vit
from orthomerge.tuning.settings import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TUNING = Tuning(epochs=2, batch=16, lr=1e-3, head_lr=1e-2, augment="shift", device="cpu")
JOINT = replace(TUNING, epochs=1)
PROCESSOR = PixelProcessor(8, channels=1)
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_task(name: str, count: int) -> Task:
    """Is the image bright?"""
    random = np.random.default_rng(count)
    splits: dict[str, Examples] = {}
    sizes: dict[Split, int] = {"train": count, "val": 12}
    for split, size in sizes.items():
        labels = random.integers(0, 2, size)
        images = [(80 + 90 * label + random.integers(0, 60, (8, 8))).astype(np.uint8) for label in labels]
        splits[split] = Examples(images, labels, split)
    return Task(name, ("dark", "bright"), "image", splits)


TASKS = {"one": make_task("one", 40), "two": make_task("two", 56), "three": make_task("three", 24)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    settings = replace(TUNING, steps=1)
    pretrained_vit(TASKS, folder=folder, shape=SHAPE, settings=settings, processor=PROCESSOR, say=lambda text: None)
    return folder / "base"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_experts_and_the_joint_model(base: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "base").symlink_to(base)
    options: dict[str, Any] = {"processor": PROCESSOR, "say": lines.append}
    experts, mtl = make_both(TASKS, folder=tmp_path, settings=TUNING, joint=JOINT, **options)
    assert experts == {name: tmp_path / "experts" / name for name in TASKS}
    assert mtl == {name: tmp_path / "mtl" / name for name in TASKS}
    assert len(files(tmp_path / "experts")) == 3 * len(TASKS)  # weights, config, marker
    assert len(lines) == 4
    assert lines[0].startswith("one: loss")
    assert lines[3] == "trained on all tasks together"


def test_what_is_there_is_kept_and_an_error_comes_through(base: Path, tmp_path: Path) -> None:
    said: list[str] = []
    settings = replace(TUNING, mode="tau_jp", steps=1)  # the others' inputs go along
    options: dict[str, Any] = {"base": base, "root": tmp_path, "settings": settings, "processor": PROCESSOR}
    made = make_experts({name: TASKS[name] for name in ("one", "two")}, **options, say=said.append)
    before = files(made["one"])
    shutil.rmtree(made["two"])
    made["two"].mkdir()
    (made["two"] / "diary.txt").write_text("dear diary")
    with pytest.raises(OutputError, match=r"two exists already"):
        make_experts(TASKS, **options, say=said.append)
    assert files(made["one"]) == before
    assert not (made["two"] / "config.json").exists()
    shutil.rmtree(made["two"])
    make_experts(TASKS, **options, say=said.append)
    assert [line.partition(":")[0] for line in said].count("one") == 1
    assert all((tmp_path / name / "config.json").is_file() for name in TASKS)
    assert files(made["one"]) == before


def test_where_experts_lie(tmp_path: Path) -> None:
    assert experts_root(tmp_path, "full", 0) == tmp_path / "experts"
    assert experts_root(tmp_path, "tau_jp", 2) == tmp_path / "experts-tau_jp-2"
