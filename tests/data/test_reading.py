"""One function reads whatever people have; a val split is split off once and for all; inputs may have no labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data.making import make_rows, picture, refused, write

from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.data import reading
from orthomerge.data.datasets_hub import names_dataset
from orthomerge.data.reading import as_input, may_be_read, read_task, unlabelled_tasks
from orthomerge.data.task import Examples, Lazy, Task

SHARED = Path(__file__).parents[3] / "shared" / "data"
NAMES = ("zebra", "ape")
MISSING = ("data/train.csv", "data/x.npz", "word", Path("org/name"))


def test_val_is_split_off_by_class(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", make_rows(40, 4))
    task = read_task(path)
    train, val = task["train"], task["val"]
    assert (len(train), len(val), val.split) == (36, 4, "val")
    assert sorted([*train.inputs, *val.inputs]) == sorted(f"train {n}" for n in range(40))
    for examples in (train, val):
        assert examples.labels is not None
        assert [int(text.split()[1]) % 2 for text in examples.inputs] == examples.labels.tolist()
        assert len(set(np.bincount(examples.labels))) == 1
    np.random.seed(1)
    assert read_task(path)["val"].inputs == val.inputs


def test_val_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", make_rows(40, 4))
    assert "val" not in read_task(path, validation=0).splits
    monkeypatch.setattr(reading, "_MAX_VALIDATION", 6)
    assert len(read_task(path, validation=0.5)["val"]) == 6
    for ratio in (-0.1, 1.0):
        refused(path, rf"'validation' must be at least 0 and less than 1, got {ratio}", RecipeError, validation=ratio)
    assert len(read_task(write(tmp_path / "b.jsonl", make_rows(2, 2)), validation=0.5)["train"]) == 2


def test_names_and_modality(tmp_path: Path) -> None:
    path = write(tmp_path / "a.b.jsonl.gz", make_rows())
    assert (read_task(path, modality="text").name, read_task(path, name="mine").name) == ("a.b", "mine")
    refused(path, r"gz must hold inputs of modality 'image', got 'text'", RecipeError, modality="image")


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(reading, "read_hub", never)
    (tmp_path / "a.xlsx").touch()
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "a.npz", x_test=np.zeros((2, 2, 2), np.uint8))
    for source, match in (
        (tmp_path / "a.xlsx", "a.xlsx is not in a supported format; a task is a table"),
        (tmp_path / "empty", "empty has no data in a supported format; a task is a table"),
        (tmp_path / "a.npz", "a.npz has no labels at all"),
        *((source, "does not exist; a task is a table") for source in MISSING),
    ):
        refused(source, match)
    refused(["x"], "the data of a task must be a path or the name of a dataset, got list", RecipeError)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the checkout")
@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("text/trec6.jsonl.gz", 5371, 500, 6), ("text/banking77.jsonl.gz", 10003, 3000, 77),
     ("vision/signdigits.npz", 1650, 412, 10)],
)  # fmt: skip
def test_shared_data(name: str, train: int, test: int, classes: int) -> None:
    task = read_task(SHARED / name)
    assert len(task.labels) == classes
    assert (len(task["train"]) + len(task["val"]), len(task["test"])) == (train, test)


def test_names_of_datasets() -> None:
    for good in ("org/name", "org/name:config", "org/name@main", "nyu-mll/glue:sst2@refs"):
        assert names_dataset(good)
    for wrong in ("name", "org/name:", "a/b/c", "org/name.json", "org/name.parquet", "../x"):
        assert not names_dataset(wrong)


def test_what_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    assert may_be_read(str(tmp_path / "a.csv"))
    assert may_be_read("org/name:config@v1")
    for text in (str(tmp_path / "b.csv"), "org/b.csv", "~nobody-of-this-name/a", "a\0b", "x" * 5000):
        assert not may_be_read(text)


# Inputs without labels


def bare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"text": row["text"], "split": row["split"]} for row in rows]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table_without_labels(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", bare(make_rows(20, 4)))
    refused(path, "has no column 'label'", RecipeError)
    task = read_task(path, unlabelled=NAMES)
    assert (task.labels, list(task.splits)) == (NAMES, ["train", "test"])  # there are no classes to split val off by
    assert all(part.labels is None for part in task.splits.values())
    assert task["train"].inputs == [f"train {number}" for number in range(20)]


def test_labels_that_are_there_are_read_and_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", make_rows(20, 4))
    task = read_task(path, unlabelled=("x", "y"))
    assert task.labels == NAMES
    assert task["train"].labels is not None
    inputs = unlabelled_tasks({"beasts": path}, {"beasts": ("ape", "zebra")}, "text", split="train")["beasts"]
    assert (inputs.name, inputs.labels, list(inputs.splits)) == ("beasts", ("ape", "zebra"), ["train"])
    assert inputs["train"].labels is None
    assert inputs["train"].inputs == task["train"].inputs
    with pytest.raises(IncompatibleError, match="labels of task 'beasts' are not those of its expert"):
        unlabelled_tasks({"beasts": path}, {"beasts": ("ape", "cow")}, "text", split="train")
    gap = [{**row, "label": ""} if number == 3 else row for number, row in enumerate(make_rows(20, 4))]
    refused(write(tmp_path / "b.csv", gap), "must have a whole number or a name as 'label'", unlabelled=NAMES)


def test_a_file_per_split_some_with_labels(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", make_rows(20, 0))
    write(tmp_path / "test.csv", bare(make_rows(0, 4)))
    task = read_task(tmp_path, unlabelled=NAMES)
    assert (task["train"].labels is None, task["test"].labels) == (False, None)


def test_some_inputs_are_drawn_and_no_others_are_opened() -> None:
    opened: list[int] = []

    def load(key: int) -> str:
        opened.append(key)
        return f"text {key}"

    task = Task("t", NAMES, "text", {"train": Examples(Lazy(range(50), load), None, "train")})

    def drawn(limit: int, seed: int = 0) -> list[str]:
        tasks = unlabelled_tasks({"t": task}, {"t": NAMES}, "text", split="train", limit=limit, seed=seed)
        return list(tasks["t"]["train"].inputs)

    first = drawn(7)
    assert first == [f"text {key}" for key in opened] == [f"text {key}" for key in sorted(opened)]
    assert [len(drawn(limit)) for limit in (1, 7, 49, 50, 99)] == [1, 7, 49, 50, 50]
    assert set(first) < set(drawn(20))
    assert first != drawn(7, seed=1)


def test_inputs_as_objects(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", (1, 2, 3))
    pixels = np.full((3, 4, 3), (1, 2, 3), np.uint8)
    items = [path, str(path), Image.open(path), pixels]
    tasks = unlabelled_tasks({"t": items}, {"t": NAMES}, "image", split="train")
    assert all(np.array_equal(item, pixels) for item in tasks["t"]["train"].inputs)
    with pytest.raises(RecipeError, match="reads texts, got int; give strings"):
        unlabelled_tasks({"t": ["a", 3]}, {"t": NAMES}, "text", split="train")
    with pytest.raises(RecipeError, match="an image must be a path, a PIL image or uint8 pixels"):
        as_input(np.zeros((3, 4)), "image")
