"""Folders of pictures, opened one by one and only when looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from orthomerge.core.errors import CheckpointError
from orthomerge.data import images
from orthomerge.data.images import decode
from orthomerge.data.reading import read_task
from orthomerge.data.task import Lazy

Picture = Callable[..., Path]


@pytest.fixture
def animals(tmp_path: Path, picture: Picture) -> Path:
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


def test_nothing_is_decoded_before_it_is_looked_at(animals: Path) -> None:
    broken = animals / "train" / "ape" / "03.PNG"
    broken.write_bytes(broken.read_bytes()[:40])
    inputs = read_task(animals, validation=0)["train"].inputs
    assert isinstance(inputs, Lazy)
    assert len(inputs[2:5]) == 3
    assert inputs[2].shape == (3, 4, 3)
    with pytest.raises(CheckpointError, match=r"03.PNG cannot be decoded \(.*\); it is damaged, or no picture"):
        inputs[3]


def test_classes_without_splits(tmp_path: Path, picture: Picture) -> None:
    for label in ("10", "9", "train"):
        for n in range(3):
            picture(tmp_path / label / f"{n}.png")
    task = read_task(tmp_path)
    assert task.labels == ("10", "9", "train")
    assert {split: len(examples) for split, examples in task.splits.items()} == {"train": 8, "val": 1}


def test_numbered_classes_are_in_the_order_of_the_numbers(tmp_path: Path, picture: Picture) -> None:
    for label in ("10", "9", "2"):
        picture(tmp_path / label / "0.png")
    assert read_task(tmp_path).labels == ("2", "9", "10")


def test_a_class_without_pictures(animals: Path) -> None:
    (animals / "train" / "horse").mkdir()
    with pytest.raises(CheckpointError, match="the train split has no examples of 'horse'"):
        read_task(animals)


def test_an_empty_split(animals: Path) -> None:
    (animals / "val").mkdir()
    with pytest.raises(CheckpointError, match=r"the val split .*val is empty: there must be a folder of pictures"):
        read_task(animals)
    (animals / "valid").mkdir()
    with pytest.raises(CheckpointError, match="'val' and 'valid' are both the val split"):
        read_task(animals)


def test_what_is_no_picture(animals: Path) -> None:
    (animals / "trian").mkdir()
    with pytest.raises(CheckpointError, match=r"must hold the pictures of one class, got 'ape', 'zebra'; splits are"):
        read_task(animals)
    (animals / "trian").rmdir()
    (animals / "test" / "ape" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"must hold the pictures of one class, got 'notes.txt'"):
        read_task(animals)


def test_bombs(tmp_path: Path, picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = picture(tmp_path / "a.png", size=(20, 30))
    with monkeypatch.context() as patch:
        patch.setattr(images, "_MOST_PIXELS", 599)
        with pytest.raises(CheckpointError, match=r"a.png is 20 x 30; more than 599 pixels is refused"):
            decode(path, where=str(path))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(CheckpointError, match=r"a.png cannot be decoded \(Image size \(600 pixels\) exceeds"):
        decode(path, where=str(path))


@pytest.mark.parametrize(
    ("mode", "shape"), [("1", (3, 4)), ("L", (3, 4)), ("LA", (3, 4)), ("P", (3, 4, 3)), ("RGBA", (3, 4, 3))]
)
def test_modes(mode: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    Image.new(mode, (4, 3)).save(tmp_path / "a.png")
    found = decode((tmp_path / "a.png").read_bytes(), where="here")
    assert found.dtype == np.uint8
    assert found.shape == shape


def test_sixteen_bits_keep_the_upper_eight(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 2), 0x1234, np.uint16)).save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", where="here").tolist() == [[0x12, 0x12], [0x12, 0x12]]


def test_thirty_two_bits(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(CheckpointError, match=r"here has 32 bits a pixel \(mode F\); save it with 8 bits a channel"):
        decode(tmp_path / "a.tiff", where="here")


def test_pictures_are_turned_as_the_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    Image.new("L", (4, 3)).save(tmp_path / "a.jpg", exif=exif)
    assert decode(tmp_path / "a.jpg", where="here").shape == (4, 3)
