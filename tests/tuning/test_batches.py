"""Orders drawn by a seed, and batches made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Task
from orthomerge.tuning.batches import Feed, check_labelled, epoch_order, sample


def test_every_example_comes_once_an_epoch() -> None:
    for epoch in range(3):
        places = epoch_order([10, 3, 25], 4, seed=0, epoch=epoch)
        assert len(places) == 3 + 1 + 7
        for number, size in enumerate([10, 3, 25]):
            rows = [row for at, part in places if at == number for row in part]
            assert sorted(rows) == list(range(size))


def test_orders_depend_on_seed_and_epoch_only() -> None:
    first = epoch_order([20, 20], 4, seed=3, epoch=1)
    torch.manual_seed(99)
    assert epoch_order([20, 20], 4, seed=3, epoch=1) == first
    assert epoch_order([20, 20], 4, seed=3, epoch=2) != first
    assert epoch_order([20, 20], 4, seed=4, epoch=1) != first
    assert [number for number, _ in first] != sorted(number for number, _ in first)  # tasks are mixed


def test_samples_repeat_nothing_and_are_as_large_as_can_be() -> None:
    assert sorted(sample(5, 9, seed=0, step=0)) == [0, 1, 2, 3, 4]
    chosen = sample(100, 7, seed=0, step=3)
    assert len(set(chosen)) == 7
    assert chosen == sample(100, 7, seed=0, step=3) != sample(100, 7, seed=0, step=4)


def test_batches_in_order_with_labels(words: Task, processors: dict[str, Any]) -> None:
    feed = Feed([words["train"], words["val"].unlabelled()], processors["text"], torch.device("cpu"))
    labels = torch.cat([labels for _, labels in feed.ordered(0, 40)])
    assert labels.tolist() == list(words["train"].labels if words["train"].labels is not None else [])
    batch, unknown = feed.batch((1, [3, 0]))
    assert unknown.tolist() == [-1, -1]
    assert (
        batch["input_ids"].tolist()
        == processors["text"]([words["val"].inputs[3], words["val"].inputs[0]])["input_ids"].tolist()
    )


def test_what_cannot_be_learnt_from(words: Task) -> None:
    empty = Task("x", ("a", "b"), "text", {"train": Examples([], None, "train"), "val": words["val"].unlabelled()})
    with pytest.raises(RecipeError, match="the train split of task 'x' is empty; it must have examples"):
        check_labelled(empty, "train")
    with pytest.raises(RecipeError, match="the val split of task 'x' has no labels; an expert is made from labelled"):
        check_labelled(empty, "val")
    with pytest.raises(RecipeError, match="has no 'test' split"):
        check_labelled(empty, "test")
