"""Trainings of a suite in processes: the same bytes as in one, and errors as they are."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from orthomerge.data.pixels import PixelProcessor
from orthomerge.data.task import Examples, Split, Task
from orthomerge.errors import OrthomergeError, OutputError, RecipeError
from orthomerge.suites.building import experts_root, make_both, make_experts, pretrained_vit
from orthomerge.suites.table import build_suite
from orthomerge.suites.training import Training, train_missing
from orthomerge.tuning.settings import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
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


def test_processes_write_the_same_bytes(base: Path, tmp_path: Path) -> None:
    said: dict[int, list[str]] = {1: [], 2: []}
    made = []
    for workers, lines in said.items():
        folder = tmp_path / str(workers)
        folder.mkdir()
        (folder / "base").symlink_to(base)
        options: dict[str, Any] = {"processor": PROCESSOR, "say": lines.append, "workers": workers}
        experts, mtl = make_both(TASKS, folder=folder, settings=TUNING, joint=JOINT, **options)
        assert experts == {name: folder / "experts" / name for name in TASKS}
        assert mtl == {name: folder / "mtl" / name for name in TASKS}
        assert len(lines) == 4
        made.append({name: files(folder / name) for name in ("experts", "mtl")})
    assert made[0] == made[1]
    assert len(made[0]["experts"]) == 2 * len(TASKS)
    assert sorted(said[1]) == sorted(said[2])
    assert said[1][3] == "trained on all tasks together"
    assert said[1][0].startswith("one: loss")


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
        make_experts(TASKS, **options, say=said.append, workers=2)
    assert files(made["one"]) == before
    assert not (made["two"] / "config.json").exists()
    shutil.rmtree(made["two"])
    make_experts(TASKS, **options, say=said.append)
    assert [line.partition(":")[0] for line in said].count("one") == 1
    assert all((tmp_path / name / "config.json").is_file() for name in TASKS)
    assert files(made["one"]) == before


@dataclass(frozen=True)
class Fatal(PixelProcessor):
    """Ends the process that it is used in."""

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        os._exit(7)


def test_a_process_that_dies(base: Path, tmp_path: Path) -> None:
    trainings = [Training({name: task}, base, tmp_path, TUNING, Fatal(8, channels=1)) for name, task in TASKS.items()]
    with pytest.raises(OrthomergeError, match=r"a process at work ended without a word, .*; use fewer workers"):
        train_missing(trainings, workers=2, say=lambda text: None)


def test_no_workers_at_all(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'workers' must be at least 1, got 0"):
        build_suite("digits", folder=tmp_path, workers=0)


def test_where_experts_lie(tmp_path: Path) -> None:
    assert experts_root(tmp_path, "full", 0) == tmp_path / "experts"
    assert experts_root(tmp_path, "tau_jp", 2) == tmp_path / "experts-tau_jp-2"
