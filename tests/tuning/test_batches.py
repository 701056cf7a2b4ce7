"""Settings that are checked, orders drawn by a seed, the batches made of them, and images that are shifted."""

from typing import Any

import pytest
import torch
from tests.tuning.conftest import PROCESSORS

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build
from orthomerge.data.task import Task
from orthomerge.tuning.batches import Feed, epoch_order, sample, shift, shifted
from orthomerge.tuning.settings import Tuning


def test_settings_are_a_schema() -> None:
    read = build(Tuning, {"mode": "tau_jp", "epochs": 2, "penalty": 0.5, "steps": 7}, where="tuning")
    assert read == Tuning(mode="tau_jp", epochs=2.0, penalty=0.5, steps=7)
    with pytest.raises(RecipeError, match=r"unknown option 'learning_rate'"):
        build(Tuning, {"learning_rate": 1.0}, where="tuning")
    with pytest.raises(RecipeError, match=r"'mode' must be full \| head_first .*; did you mean 'linear"):
        build(Tuning, {"mode": "lineraised"}, where="tuning")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0.0}, "'epochs' must be positive, got 0.0"),
        ({"lr": -1.0}, "'lr' must be positive, got -1.0"),
        ({"lr": float("nan")}, "'lr' must be positive, got nan"),
        ({"head_lr": 2e3}, "'lr' and 'head_lr' must be at most 1000, got 0.0001 and 2000"),
        ({"batch": 0}, r"'batch' must be at least 1, got 0"),
        ({"rank": 0}, r"'rank' must be at least 1, got 0"),
        ({"clip": -0.1}, "'clip' must be at least 0, got -0.1"),
        ({"warmup": 1.0}, r"'warmup' must be in \[0, 1\), got 1.0"),
        ({"steps": 0}, "'steps' must be at least 1, got 0"),
    ],
)
def test_values_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Tuning(**wrong)


def listed(sizes: list[int], batch: int, **draw: int) -> list[tuple[int, list[int]]]:
    return [(number, rows.tolist()) for number, rows in epoch_order(sizes, batch, **draw)]


def test_every_example_comes_once_an_epoch_in_an_order_of_seed_and_epoch() -> None:
    for epoch in range(3):
        batches = listed([10, 3, 25], 4, seed=0, epoch=epoch)
        assert len(batches) == 3 + 1 + 7
        for number, size in enumerate([10, 3, 25]):
            rows = [row for at, part in batches if at == number for row in part]
            assert sorted(rows) == list(range(size))
    first = listed([20, 20], 4, seed=3, epoch=1)
    torch.manual_seed(99)
    assert listed([20, 20], 4, seed=3, epoch=1) == first
    assert listed([20, 20], 4, seed=3, epoch=2) != first
    assert listed([20, 20], 4, seed=4, epoch=1) != first
    assert [number for number, _ in first] != sorted(number for number, _ in first)  # tasks are mixed


def test_samples_repeat_nothing_and_are_as_large_as_can_be() -> None:
    assert sample(5, 9, seed=0, step=0).sort().values.tolist() == [0, 1, 2, 3, 4]
    chosen = sample(100, 7, seed=0, step=3).tolist()
    assert len(set(chosen)) == 7
    assert chosen == sample(100, 7, seed=0, step=3).tolist() != sample(100, 7, seed=0, step=4).tolist()


def test_batches_in_order_with_labels(words: Task) -> None:
    feed = Feed([words["train"], words["val"].unlabelled()], PROCESSORS["text"], torch.device("cpu"))
    labels = torch.cat([labels for _, labels in feed.ordered(0, 40)])
    assert labels.tolist() == list(words["train"].labels if words["train"].labels is not None else [])
    batch, unknown = feed.batch(1, torch.tensor([3, 0]))
    assert unknown.tolist() == [-1, -1]
    expected = PROCESSORS["text"]([words["val"].inputs[3], words["val"].inputs[0]])
    assert batch["input_ids"].tolist() == expected["input_ids"].tolist()


def test_the_edge_is_repeated() -> None:
    image = torch.arange(9.0).view(1, 1, 3, 3).expand(3, 2, 3, 3)
    images = shift(image, torch.tensor([[1, 0], [0, -1], [-1, 2]]))
    assert images[0, 0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]  # down
    assert images[1, 1].tolist() == [[1, 2, 2], [4, 5, 5], [7, 8, 8]]  # to the left
    assert images[2, 0].tolist() == [[3, 3, 3], [6, 6, 6], [6, 6, 6]]  # up, and twice to the right
    assert images[:, 0].equal(images[:, 1])


def moves(step: int, *, seed: int = 0, count: int = 400) -> list[tuple[int, int]]:
    """By how much images of 16 rows and 24 columns were moved, read off the pixel that was in their middle."""
    images = torch.zeros(count, 1, 16, 24)
    images[:, :, 8, 12] = 1
    images = shifted({"pixel_values": images}, seed=seed, step=step)["pixel_values"]
    assert images.sum() == count
    return [(row - 8, column - 12) for _, _, row, column in images.nonzero().tolist()]


def test_images_move_by_up_to_an_eighth_of_their_side_and_nothing_else_does() -> None:
    first = moves(3)
    assert set(first) == {(down, right) for down in range(-2, 3) for right in range(-3, 4)}
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    assert moves(3) == first
    assert torch.random.get_rng_state().equal(before)
    assert moves(4) != first
    assert moves(3, seed=1) != first
    assert [pair[0] for pair in first] != [pair[1] for pair in first]
    batch = {"pixel_values": torch.randn(3, 3, 7, 7), "other": torch.arange(3)}
    same = shifted(batch, seed=0, step=0)  # a side of 7 has no eighth
    assert all(same[name].equal(tensor) for name, tensor in batch.items())
