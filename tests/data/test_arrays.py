"""Images in .npz files; nothing in them is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orthomerge.core.errors import CheckpointError
from orthomerge.data import images as module
from orthomerge.data.reading import read_task

Arrays = Callable[..., Path]


def test_round_trip(arrays: Arrays) -> None:
    task = read_task(arrays(), validation=0)
    assert (task.name, task.modality, task.labels) == ("toy", "image", ("zebra", "ape"))
    assert len(task["train"]) == 20
    assert task["train"].inputs[3].tolist() == [[12, 13], [14, 15]]
    labels = task["test"].labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 1, 0]


def test_all_splits_and_colours(arrays: Arrays) -> None:
    task = read_task(arrays(x_val=np.ones((2, 2, 2, 3), np.uint8), y_val=np.array([1, 1]), label_names=None))
    assert list(task.splits) == ["train", "val", "test"]
    assert task["val"].inputs[0].shape == (2, 2, 3)
    assert task.labels == ("0", "1")


def test_one_channel_is_grey(arrays: Arrays) -> None:
    assert read_task(arrays(x_test=np.zeros((4, 2, 2, 1), np.uint8)))["test"].inputs[0].shape == (2, 2)


def test_a_test_split_without_labels(arrays: Arrays) -> None:
    assert read_task(arrays(y_test=None))["test"].labels is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((20, 2, 2))}, r"x_train must be uint8 \[N, H, W\] .*, got float64 \[20, 2, 2\]"),
        ({"x_train": np.zeros((20, 3, 2, 2), np.uint8)}, r"x_train must be uint8 .*, got uint8 \[20, 3, 2, 2\]"),
        ({"y_train": np.zeros(19, int)}, r"y_train must hold 20 whole numbers, got int64 \[19\]"),
        ({"y_train": np.zeros(20)}, r"y_train must hold 20 whole numbers, got float64"),
        ({"y_train": None}, "the train split needs x_train and y_train, but y is missing"),
        ({"x_test": None}, "the test split needs x_test and y_test, but x is missing"),
        ({"x_test": np.zeros((0, 2, 2), np.uint8), "y_test": np.zeros(0, int)}, "x_test is empty"),
        ({"x_tets": np.zeros(1)}, "array 'x_tets' must be of split train, val or test"),
        ({"x_training": np.zeros(1)}, "x_: 'train' and 'training' are both the train split"),
        ({"label_names": np.array([1, 2])}, r"label_names must be texts, got int64 \[2\]"),
        ({"label_names": np.array(["a", "a"])}, r"labels 0 and 1 are both called 'a'"),
        ({"y_test": np.array([0, 1, 7, 0])}, r"y_test\[2\]: label 7 has no name; named are 'zebra', 'ape'"),
        ({"y_train": np.zeros(20, int)}, r"the train split has no examples of 'ape'"),
        ({"x_train": np.array([{}], dtype=object)}, r"cannot be read as .npz \(Object arrays cannot be loaded"),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], message: str, arrays: Arrays) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_task(arrays(**changes))


def test_other_files(tmp_path: Path, arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(CheckpointError, match=r"text.npz cannot be read as .npz"):
        read_task(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(1), b=np.zeros(1))
    with pytest.raises(CheckpointError, match=r"must hold x_train, y_train, x_test and y_test, got a, b"):
        read_task(tmp_path / "other.npz")
    path = arrays()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"toy.npz cannot be read as .npz"):
        read_task(path)
    monkeypatch.setattr(module, "_MOST_ARRAYS", 10)
    with pytest.raises(CheckpointError, match=r"unpacks to \d+ bytes, but at most 10 are read"):
        read_task(arrays())
