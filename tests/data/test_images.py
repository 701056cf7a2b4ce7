"""Pictures in folders, opened one by one and only when they are used, and in .npz files, which are never unpickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data.making import arrays, picture, refused

from orthomerge.core.errors import CheckpointError
from orthomerge.data import images
from orthomerge.data.images import decode
from orthomerge.data.reading import read_task
from orthomerge.data.task import Lazy


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    for split, count in (("train", 10), ("test", 2)):
        for n in range(count):
            picture(tmp_path / split / "zebra" / f"{n:02}.png", n)
            picture(tmp_path / split / "ape" / f"{n:02}.PNG", (n, 100, 200))
    (tmp_path / "train" / "ape" / ".DS_Store").touch()
    (tmp_path / "train" / "ape" / "Thumbs.db").touch()
    (tmp_path / "README.md").touch()
    return tmp_path


def test_splits_and_classes(animals: Path) -> None:
    task = read_task(animals, name="animals", validation=0.2)
    assert (task.name, task.modality, task.labels) == ("animals", "image", ("ape", "zebra"))
    assert {split: len(examples) for split, examples in task.splits.items()} == {"train": 16, "val": 4, "test": 4}
    test = task["test"]
    assert test.labels is not None
    assert test.labels.tolist() == [0, 0, 1, 1]
    assert [item.shape for item in test.inputs] == [(3, 4, 3), (3, 4, 3), (3, 4), (3, 4)]
    assert test.inputs[1][0, 0].tolist() == [1, 100, 200]
    assert test.inputs[3][0, 0] == 1


def test_nothing_is_decoded_before_it_is_used(animals: Path) -> None:
    broken = animals / "train" / "ape" / "03.PNG"
    broken.write_bytes(broken.read_bytes()[:40])
    inputs = read_task(animals, validation=0)["train"].inputs
    assert isinstance(inputs, Lazy)
    assert len(inputs[2:5]) == 3
    assert inputs[2].shape == (3, 4, 3)
    with pytest.raises(CheckpointError, match=r"03.PNG cannot be decoded \(.*\); it is damaged, or not a picture"):
        inputs[3]


@pytest.mark.parametrize(
    ("classes", "expected"), [(("10", "9", "train"), ("10", "9", "train")), (("10", "9", "2"), ("2", "9", "10"))]
)
def test_classes_without_splits(classes: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path) -> None:
    for label in classes:
        for n in range(3):
            picture(tmp_path / label / f"{n}.png")
    task = read_task(tmp_path)
    assert task.labels == expected
    assert {split: len(examples) for split, examples in task.splits.items()} == {"train": 8, "val": 1}


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train/horse"], "the train split has no examples of 'horse'"),
        (["val"], r"the val split .*val is empty: there must be a folder of pictures"),
        (["val", "valid"], "'val' and 'valid' are both the val split"),
        (["test/ape/more"], r"must hold the pictures of one class, got 'more'"),
    ],
)
def test_folders_that_are_refused(folders: list[str], message: str, animals: Path) -> None:
    for folder in folders:
        (animals / folder).mkdir()
    refused(animals, message)


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = picture(tmp_path / "a.png", size=(20, 30))
    with monkeypatch.context() as patch:
        patch.setattr(images, "_MAX_PIXELS", 599)
        with pytest.raises(CheckpointError, match=r"a.png must have at most 599 pixels, got 20 x 30"):
            decode(path, where=str(path))
        patch.setattr(images, "_MAX_BYTES", 9)
        with pytest.raises(CheckpointError, match=r"a.png must have at most 9 bytes, got \d+"):
            decode(path, where=str(path))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(CheckpointError, match=r"a.png cannot be decoded \(Image size \(600 pixels\) exceeds"):
        decode(path, where=str(path))
    os.mkfifo(tmp_path / "b.png")
    with pytest.raises(CheckpointError, match=r"b.png is not a regular file"):
        decode(tmp_path / "b.png", where="here")


@pytest.mark.parametrize(
    ("mode", "shape"), [("1", (3, 4)), ("L", (3, 4)), ("LA", (3, 4)), ("P", (3, 4, 3)), ("RGBA", (3, 4, 3))]
)
def test_modes(mode: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    Image.new(mode, (4, 3)).save(tmp_path / "a.png")
    values = decode((tmp_path / "a.png").read_bytes(), where="here")
    assert values.dtype == np.uint8
    assert values.shape == shape


def test_depths_and_turns(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 2), 0x1234, np.uint16)).save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", where="here").tolist() == [[0x12, 0x12], [0x12, 0x12]]
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(CheckpointError, match=r"here has 32 bits per pixel \(mode F\); save it with 8 bits per"):
        decode(tmp_path / "a.tiff", where="here")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    Image.new("L", (4, 3)).save(tmp_path / "a.jpg", exif=exif)
    assert decode(tmp_path / "a.jpg", where="here").shape == (4, 3)


# Arrays


def test_round_trip(tmp_path: Path) -> None:
    task = read_task(arrays(tmp_path / "toy.npz"), validation=0)
    assert (task.name, task.modality, task.labels) == ("toy", "image", ("zebra", "ape"))
    assert (len(task["train"]), task["train"].inputs[3].tolist()) == (20, [[12, 13], [14, 15]])
    labels = task["test"].labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 1, 0]


def test_all_splits_and_colours(tmp_path: Path) -> None:
    colours = {"x_val": np.ones((2, 2, 2, 3), np.uint8), "x_test": np.zeros((4, 2, 2, 1), np.uint8)}
    task = read_task(arrays(tmp_path / "toy.npz", **colours, y_val=np.array([1, 1]), y_test=None, label_names=None))
    assert list(task.splits) == ["train", "val", "test"]
    assert task["val"].inputs[0].shape == (2, 2, 3)
    assert task["test"].inputs[0].shape == (2, 2)
    assert (task.labels, task["test"].labels) == (("0", "1"), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((20, 2, 2))}, r"x_train must be uint8 \[N, H, W\] .*, got float64 \[20, 2, 2\]"),
        ({"y_train": np.zeros(19, int)}, r"y_train must hold 20 whole numbers, got int64 \[19\]"),
        ({"y_train": None}, "the train split needs x_train and y_train, but y is missing"),
        ({"x_test": np.zeros((0, 2, 2), np.uint8), "y_test": np.zeros(0, int)}, "x_test is empty"),
        ({"x_tets": np.zeros(1)}, "array 'x_tets' must be named after a split: train, val or test"),
        ({"x_training": np.zeros(1)}, "x_: 'train' and 'training' are both the train split"),
        ({"label_names": np.array([1, 2])}, r"label_names must be texts, got int64 \[2\]"),
        ({"label_names": np.array(["a", "a"])}, r"labels 0 and 1 are both called 'a'"),
        ({"y_test": np.array([0, 1, 7, 0])}, r"y_test\[2\]: label 7 has no name; the names are 'zebra', 'ape'"),
        ({"x_train": np.array([{}], dtype=object)}, r"cannot be read as .npz \(Object arrays cannot be loaded"),
    ],
)
def test_arrays_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(arrays(tmp_path / "toy.npz", **changes), message)


def test_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = arrays(tmp_path / "toy.npz")
    (tmp_path / "half.npz").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(tmp_path / "half.npz", r"half.npz cannot be read as .npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(1), b=np.zeros(1))
    refused(tmp_path / "other.npz", r"must hold x_train, y_train, x_test and y_test, got a, b")
    monkeypatch.setattr(images, "_MAX_ARRAYS", 10)
    refused(path, r"must unpack to at most 10 bytes on this machine, got \d+")
