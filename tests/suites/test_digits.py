"""The embedded suite: its seven tasks, and a small build of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orthomerge.data.task import Task
from orthomerge.suites import digits
from orthomerge.suites.digits import digit_tasks
from orthomerge.suites.suite import more_experts
from orthomerge.tuning.settings import Tuning

SIZES = {"train": 1168, "val": 180, "test": 449}
TEN = tuple("0123456789")
LABELS = {
    "digit": TEN,
    "parity": ("even", "odd"),
    "size": ("0-2", "3-5", "6-9"),
    "rotation": ("0", "90", "180", "270"),
    "mirrored": ("as written", "mirrored"),
    "negative": TEN,
    "shift": ("none", "left", "right", "up", "down"),
}


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return digit_tasks()


def rows(task: Task, split: str) -> tuple[Any, Any]:
    part = task[split]
    assert part.labels is not None
    return np.stack(list(part.inputs)).astype(int), part.labels


def test_seven_tasks_with_their_labels(tasks: dict[str, Task]) -> None:
    assert {name: task.labels for name, task in tasks.items()} == LABELS
    for name, task in tasks.items():
        assert (task.name, task.modality) == (name, "image")
        assert {split: len(part) for split, part in task.splits.items()} == SIZES
        for split, part in task.splits.items():
            images, labels = rows(task, split)
            assert part.split == split
            assert images.shape == (SIZES[split], 8, 8)
            assert part.inputs[0].dtype == np.uint8
            assert labels.dtype == np.int64
            assert set(labels) == set(range(len(task.labels)))  # every class occurs in every split
    assert sum(SIZES.values()) == 1797


@pytest.mark.parametrize("split", SIZES)
def test_all_tasks_split_the_same_images_alike(tasks: dict[str, Task], split: str) -> None:
    plain, digit = rows(tasks["digit"], split)
    for name, expected in (("parity", digit % 2), ("size", (digit > 2).astype(int) + (digit > 5))):
        images, labels = rows(tasks[name], split)
        assert (images == plain).all()
        assert (labels == expected).all()
    images, labels = rows(tasks["negative"], split)
    assert (images == 255 - plain).all()
    assert (labels == digit).all()
    images, turns = rows(tasks["rotation"], split)
    assert all((np.rot90(image, -turn) == old).all() for image, turn, old in zip(images, turns, plain, strict=True))
    images, turned = rows(tasks["mirrored"], split)
    assert (images[turned == 1] == plain[turned == 1][:, :, ::-1]).all()
    assert (images[turned == 0] == plain[turned == 0]).all()
    images, ways = rows(tasks["shift"], split)
    assert (images[ways == 0] == plain[ways == 0]).all()
    moves = {1: ((0, 0), (0, 2)), 2: ((0, 0), (2, 0)), 3: ((0, 2), (0, 0)), 4: ((2, 0), (0, 0))}  # left right up down
    for way, (down, right) in moves.items():
        padded = np.pad(plain[ways == way], ((0, 0), down, right))
        assert (images[ways == way] == padded[:, down[1] : down[1] + 8, right[1] : right[1] + 8]).all()


def test_splits_share_no_image_and_are_the_same_every_time(tasks: dict[str, Task]) -> None:
    from sklearn.datasets import load_digits

    everything = sorted(image.tobytes() for split in SIZES for image in tasks["digit"][split].inputs)
    assert everything == sorted(image.tobytes() for image in np.round(load_digits().images * 255 / 16).astype(np.uint8))
    for name, task in digit_tasks().items():
        for split, part in task.splits.items():
            assert part.digest() == tasks[name][split].digest()
            assert (rows(task, split)[1] == rows(tasks[name], split)[1]).all()


def test_a_small_build(tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two tasks, a few steps."""
    monkeypatch.setattr(digits, "digit_tasks", lambda: {name: tasks[name] for name in ("parity", "size")})
    for name, value in list(vars(digits).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(digits, name, replace(value, steps=3))
    lines: list[str] = []
    options: dict[str, Any] = {"folder": tmp_path, "data": None, "base": None, "device": "cpu", "say": lines.append}
    suite = digits.build(name="digits", **options)
    assert lines[0].startswith("pre-training")
    assert lines[1].startswith("trained on all tasks")
    assert [line.partition(":")[0] for line in lines[2:]] == ["parity", "size", "trained on all tasks together"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "experts", "mtl"]  # nothing else is left
    assert suite.paths == {name: tmp_path / "experts" / name for name in ("parity", "size")}
    assert suite.mtl == {name: tmp_path / "mtl" / name for name in ("parity", "size")}
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    lines.clear()
    assert digits.build(name="digits", **options).paths == suite.paths
    assert lines == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == times
    for changes, name in (({"mode": "head_first"}, "experts-head_first"), ({"seed": 1}, "experts-1")):
        made = more_experts(suite, replace(digits.TUNING, **changes), say=lines.append)
        assert made["size"] == tmp_path / name / "size"
        own, other = (tmp_path / folder / "size" / "model.safetensors" for folder in ("experts", name))
        assert own.read_bytes() != other.read_bytes()
    assert more_experts(suite, digits.TUNING, say=lines.append) == suite.paths
    assert len(lines) == 4
