"""Checks of numbers that users give."""

from __future__ import annotations

import math

from orthomerge.core.errors import RecipeError


def at_least_one(**counts: int | None) -> None:
    """Refuse counts below one; None stands for a default."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise RecipeError(f"{name!r} must be at least 1, got {count}")


def positive(**numbers: float) -> None:
    """Refuse what is not above zero and finite."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise RecipeError(f"{name!r} must be positive, got {number}")


def not_negative(**numbers: float) -> None:
    """Refuse numbers that are below zero, infinite or NaN."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise RecipeError(f"{name!r} must be a number of at least 0, got {number}")
