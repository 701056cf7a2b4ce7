"""One function reads whatever people have; a val split is carved once and for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.data import datasets_hub, reading
from orthomerge.data.reading import read_task

Write = Callable[[Path, Sequence[dict[str, Any]]], Path]
SHARED = Path(__file__).parents[3] / "shared" / "data"
TEXT = {"ag_news": (11972, 3000, 4), "trec6": (5371, 500, 6), "banking77": (10003, 3000, 77)}
VISION = {"mnist": (6000, 2000, 10), "gtsrb": (3870, 1290, 43), "signdigits": (1650, 412, 10)}


def test_val_is_carved_from_train_by_class(tmp_path: Path, rows: Callable[..., Any], write: Write) -> None:
    path = write(tmp_path / "a.jsonl", rows(40, 4))
    task = read_task(path)
    train, val = task["train"], task["val"]
    assert (len(train), len(val), val.split) == (36, 4, "val")
    assert val.labels is not None
    assert train.labels is not None
    assert np.bincount(val.labels).tolist() == [2, 2]
    assert sorted([*train.inputs, *val.inputs]) == sorted(f"train {n}" for n in range(40))
    for examples in (train, val):
        assert examples.labels is not None
        assert [int(text.split()[1]) % 2 for text in examples.inputs] == examples.labels.tolist()
    np.random.seed(1)
    assert read_task(path)["val"].inputs == val.inputs


def test_val_is_bounded(
    tmp_path: Path, rows: Callable[..., Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(40, 4))
    assert "val" not in read_task(path, validation=0).splits
    monkeypatch.setattr(reading, "_MOST_VALIDATION", 6)
    assert len(read_task(path, validation=0.5)["val"]) == 6
    for ratio in (-0.1, 1.0):
        with pytest.raises(RecipeError, match=rf"'validation' must be at least 0 and less than 1, got {ratio}"):
            read_task(path, validation=ratio)


def test_too_few_to_carve(tmp_path: Path, rows: Callable[..., Any], write: Write) -> None:
    assert len(read_task(write(tmp_path / "a.jsonl", rows(2, 2)), validation=0.5)["train"]) == 2


def test_modality_is_checked(tmp_path: Path, rows: Callable[..., Any], write: Write) -> None:
    path = write(tmp_path / "a.jsonl", rows())
    assert read_task(path, modality="text").modality == "text"
    with pytest.raises(RecipeError, match=r"a.jsonl must hold inputs of modality 'image', got 'text'"):
        read_task(path, modality="image")


def test_a_name_may_be_given(tmp_path: Path, rows: Callable[..., Any], write: Write) -> None:
    path = write(tmp_path / "a.b.jsonl.gz", rows())
    assert read_task(path).name == "a.b"
    assert read_task(path, name="mine").name == "mine"


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(reading, "read_hub", never)
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(CheckpointError, match=r"a.xlsx is of no kind that can be read; a task is a table"):
        read_task(tmp_path / "a.xlsx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty holds nothing that can be read; a task is a table"):
        read_task(tmp_path / "empty")
    for source in ("data/train.csv", "data/train.jsonl.gz", "data/x.npz", "word", Path("org/name")):
        with pytest.raises(CheckpointError, match=r"does not exist; a task is a table"):
            read_task(source)


def test_no_labels_at_all(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_test=np.zeros((2, 2, 2), np.uint8))
    with pytest.raises(CheckpointError, match=r"a.npz has no labels at all"):
        read_task(tmp_path / "a.npz")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the checkout")
@pytest.mark.parametrize("name", TEXT)
def test_shared_text(name: str) -> None:
    train, test, classes = TEXT[name]
    task = read_task(SHARED / "text" / f"{name}.jsonl.gz")
    assert (task.name, task.modality, len(task.labels)) == (name, "text", classes)
    assert (len(task["train"]) + len(task["val"]), len(task["test"])) == (train, test)
    if name == "ag_news":
        assert task.labels == ("World", "Sports", "Business", "Sci/Tech")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the checkout")
@pytest.mark.parametrize("name", VISION)
def test_shared_vision(name: str) -> None:
    train, test, classes = VISION[name]
    task = read_task(SHARED / "vision" / f"{name}.npz")
    assert (task.name, task.modality, len(task.labels)) == (name, "image", classes)
    assert (len(task["train"]) + len(task["val"]), len(task["test"])) == (train, test)
    with np.load(SHARED / "vision" / f"{name}.npz", allow_pickle=False) as archive:
        assert np.array_equal(np.stack(task["test"].inputs), archive["x_test"])
        labels = task["test"].labels
        assert labels is not None
        assert np.array_equal(labels, archive["y_test"])


def test_hub_ids() -> None:
    for good in ("org/name", "org/name:config", "org/name@main", "nyu-mll/glue:sst2@refs"):
        assert datasets_hub.is_dataset_id(good)
    for wrong in ("name", "org/name:", "a/b/c", "org/name.json", "../x"):
        assert not datasets_hub.is_dataset_id(wrong)
