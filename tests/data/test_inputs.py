"""Inputs without labels: from tables that have none, of one split, and some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.data.reading import may_be_read, names_dataset, read_inputs, read_task
from orthomerge.data.task import Examples, Lazy, Task

Write = Callable[[Path, Sequence[dict[str, Any]]], Path]
NAMES = ("zebra", "ape")


def bare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"text": row["text"], "split": row["split"]} for row in rows]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "csv.gz"])
def test_a_table_without_labels(kind: str, tmp_path: Path, rows: Callable[..., Any], write: Write) -> None:
    path = write(tmp_path / f"a.{kind}", bare(rows(20, 4)))
    with pytest.raises(RecipeError, match="has no column 'label'"):
        read_task(path)
    task = read_task(path, unlabelled=NAMES)
    assert (task.labels, list(task.splits)) == (NAMES, ["train", "test"])  # nothing to carve a val split by
    assert all(part.labels is None for part in task.splits.values())
    assert task["train"].inputs == [f"train {number}" for number in range(20)]


def test_labels_that_are_there_are_read_and_checked(tmp_path: Path, rows: Callable[..., Any], write: Write) -> None:
    path = write(tmp_path / "a.csv", rows(20, 4))
    task = read_task(path, unlabelled=("x", "y"))
    assert task.labels == NAMES
    assert task["train"].labels is not None
    found = read_inputs(path, name="beasts", labels=("ape", "zebra"), split="train")
    assert (found.name, found.labels, list(found.splits)) == ("beasts", ("ape", "zebra"), ["train"])
    assert found["train"].labels is None
    assert found["train"].inputs == task["train"].inputs
    with pytest.raises(IncompatibleError, match="labels of task 'beasts' are not those of its expert"):
        read_inputs(path, name="beasts", labels=("ape", "cow"), split="train")
    gap = [{**row, "label": ""} if number == 3 else row for number, row in enumerate(rows(20, 4))]
    with pytest.raises(CheckpointError, match="has no whole number or name as 'label'"):
        read_task(write(tmp_path / "b.csv", gap), unlabelled=NAMES)


def test_a_file_a_split_some_with_labels(tmp_path: Path, rows: Callable[..., Any], write: Write) -> None:
    write(tmp_path / "train.csv", rows(20, 0))
    write(tmp_path / "test.csv", bare(rows(0, 4)))
    task = read_task(tmp_path, unlabelled=NAMES)
    assert task["train"].labels is not None
    assert task["test"].labels is None


def test_some_inputs_are_drawn_without_their_labels() -> None:
    inputs = [f"text {number}" for number in range(50)]
    task = Task("t", NAMES, "text", {"train": Examples(inputs, None, "train")})

    def drawn(limit: int, seed: int = 0) -> list[str]:
        found = read_inputs(task, name="t", labels=NAMES, split="train", limit=limit, seed=seed)
        return list(found["train"].inputs)

    assert [len(drawn(limit)) for limit in (1, 7, 49, 50, 99)] == [1, 7, 49, 50, 50]
    assert drawn(99) == inputs
    assert set(drawn(7)) < set(drawn(20))
    assert drawn(7) == sorted(drawn(7), key=inputs.index)
    assert drawn(7) != drawn(7, seed=1)


def test_inputs_that_are_not_drawn_are_not_opened() -> None:
    opened: list[int] = []

    def load(key: int) -> str:
        opened.append(key)
        return str(key)

    task = Task("t", NAMES, "text", {"train": Examples(Lazy(range(100), load), None, "train")})
    found = read_inputs(task, name="t", labels=NAMES, split="train", limit=3)
    assert opened == []
    assert list(found["train"].inputs) == [str(key) for key in opened]
    assert len(opened) == 3


def test_what_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    assert may_be_read(str(tmp_path / "a.csv"))
    assert may_be_read("org/name:config@v1")
    for text in (str(tmp_path / "b.csv"), "org/b.csv", "~nobody-of-this-name/a", "a\0b", "x" * 5000):
        assert not may_be_read(text)
    assert names_dataset("org/name")
    assert not names_dataset("org/name.parquet")
