"""The engine: in order, in bounded memory, and without threads that outlive it."""

import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.merging.making import Products, vectors_of

from orthomerge.core.errors import NumericalError
from orthomerge.merging.elements import Average
from orthomerge.merging.kinds import Block, Scope, Site
from orthomerge.merging.stream import merge_blocks
from orthomerge.merging.vectors import TaskVector, TaskVectors

ROWS = 8  # of a block of two experts: deltas, base, result and scratch, at four bytes


def two(count: int) -> TaskVectors:
    return vectors_of(torch.arange(1.0 * count), 2 * torch.arange(1.0 * count), tile=8)


def starts(block: Block, weights: torch.Tensor) -> int:
    return block.site.start


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("memory", [1, 400, 1 << 20])
def test_every_block_once_and_in_order(workers: int, memory: int) -> None:
    found = list(merge_blocks(two(801), Average(), starts, workers=workers, memory=memory))
    assert found == list(range(0, 801, 8))


@dataclass(frozen=True)
class Slow:
    """A method whose first blocks take longest, so that later ones are ready before them."""

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        time.sleep(0.02 if site.start % 64 == 0 else 0.0)
        return deltas[0]


def test_more_workers_than_the_budget_lets_through() -> None:
    """Results wait for the oldest block, however many later ones are ready."""
    results = merge_blocks(two(800), Slow(), starts, workers=16, memory=3 * 4 * ROWS * 8)
    assert list(results) == list(range(0, 800, 8))


def test_what_cannot_be_read_or_is_not_a_number_is_raised() -> None:
    vectors = two(80)
    broken = TaskVectors({**vectors.vectors, "c": TaskVector(vectors.base, ((1.0, Products({}, mute=True)),))}, tile=8)
    with pytest.raises(AssertionError, match="the product was asked for"):
        list(merge_blocks(broken, Average(), starts))
    bad = torch.ones(20)
    bad[13] = float("nan")
    with pytest.raises(NumericalError, match=r"'w' holds NaN or infinity in expert 'a' \(memory\): 1 of 8 elements"):
        list(merge_blocks(vectors_of(bad, tile=8), Average(), starts))


def test_leaving_early_stops_the_threads() -> None:
    before = set(threading.enumerate())
    results = merge_blocks(two(8000), Average(), starts, workers=4, memory=4096)
    assert next(results) == 0
    results.close()
    assert set(threading.enumerate()) <= before
