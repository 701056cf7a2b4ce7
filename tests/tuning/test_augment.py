"""Images that are moved: by how much, by whom it is decided, and what happens at the edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.tuning.batches import moved, shift

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orthomerge.data.task import Task
    from orthomerge.tuning.loop import Report

    Tune = Callable[..., dict[str, float]]


def test_the_edge_is_repeated() -> None:
    image = torch.arange(9.0).view(1, 1, 3, 3).expand(3, 2, 3, 3)
    found = shift(image, torch.tensor([[1, 0], [0, -1], [-1, 2]]))
    assert found[0, 0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]  # down
    assert found[1, 1].tolist() == [[1, 2, 2], [4, 5, 5], [7, 8, 8]]  # to the left
    assert found[2, 0].tolist() == [[3, 3, 3], [6, 6, 6], [6, 6, 6]]  # up, and twice to the right
    assert found[:, 0].equal(found[:, 1])


def moves(step: int, *, seed: int = 0, count: int = 400) -> list[tuple[int, int]]:
    """By how much images of 16 rows and 24 columns were moved, read off the pixel that was in their middle."""
    images = torch.zeros(count, 1, 16, 24)
    images[:, :, 8, 12] = 1
    found = moved({"pixel_values": images}, seed=seed, step=step)["pixel_values"]
    assert found.sum() == count
    return [(row - 8, column - 12) for _, _, row, column in found.nonzero().tolist()]


def test_every_image_by_up_to_an_eighth_of_its_side() -> None:
    found = moves(0)
    assert set(found) == {(down, right) for down in range(-2, 3) for right in range(-3, 4)}


def test_draws_depend_on_seed_and_step_only() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = moves(3)
    assert torch.random.get_rng_state().equal(before)
    assert moves(3) == first
    assert moves(4) != first
    assert moves(3, seed=1) != first
    assert [pair[0] for pair in first] != [pair[1] for pair in first]


def test_what_is_left_alone() -> None:
    batch = {"pixel_values": torch.randn(3, 3, 7, 7), "other": torch.arange(3)}
    found = moved(batch, seed=0, step=0)  # a side of 7 has no eighth
    assert all(found[name].equal(tensor) for name, tensor in batch.items())


class Killed(BaseException):
    """As if the process had been."""


def kill_at_nine(report: Report) -> None:
    if report.step >= 9:
        raise Killed


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_killed_run_goes_on_with_the_same_draws(levels: Task, tune: Tune, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch": 32, "augment": "shift"}
    expected = tune(levels, tmp_path / "whole", **settings)
    with pytest.raises(Killed):
        tune(levels, tmp_path / "cut", **settings, more={"progress": kill_at_nine})
    assert tune(levels, tmp_path / "cut", **settings) == expected
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert expected["val_accuracy"] > 0.85
    tune(levels, tmp_path / "plain", batch=32)
    assert weights(tmp_path / "plain") != weights(tmp_path / "whole")


def test_texts_cannot_be_moved(words: Task, tune: Tune, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"'augment' must be none for a family that reads 'text', got 'shift': .*; leave"
    ):
        tune(words, tmp_path / "out", augment="shift")
    assert list(tmp_path.iterdir()) == []
