"""Derived seeds, checks of numbers, and the error for exhausted memory."""

from __future__ import annotations

import math

import pytest
import torch

from orthomerge.core.checks import at_least_one, not_negative, positive
from orthomerge.core.device import derive, enough_memory, free_memory
from orthomerge.core.errors import OrthomergeError, RecipeError


def test_derived_seeds_differ_by_purpose_and_place_and_fit_a_generator() -> None:
    seeds = {derive(seed, what, number) for seed in (0, 1) for what in ("a", "b") for number in range(5)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive(1, "a", 2) == derive(1, "a", 2)


def test_checks_of_numbers() -> None:
    at_least_one(steps=1, most=None)
    positive(lr=1e-300)
    not_negative(alpha=0.0)
    with pytest.raises(RecipeError, match="'most' must be at least 1, got 0"):
        at_least_one(steps=1, most=0)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(RecipeError, match=f"'lr' must be positive, got {wrong}"):
            positive(lr=wrong)
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(RecipeError, match=f"'alpha' must be (at least 0|a finite number), got {wrong}"):
            not_negative(alpha=wrong)


def test_exhausted_memory_is_an_error_with_advice() -> None:
    with (
        pytest.raises(OrthomergeError, match="ran out of memory with batches of 7; lower 'batch'"),
        enough_memory("batches of 7", "lower 'batch'"),
    ):
        raise torch.OutOfMemoryError
    assert free_memory(torch.device("cpu")) > 0
