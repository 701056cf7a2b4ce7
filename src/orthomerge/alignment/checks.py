"""Checks of options that several aligners have."""

from __future__ import annotations

import math
from typing import Literal

from orthomerge.errors import RecipeError

__all__ = ["strength"]


def strength(name: str, value: float | Literal["auto"]) -> None:
    """A strength is 0 or more, infinity for "change nothing", or `auto`."""
    if value != "auto" and (math.isnan(value) or value < 0):
        raise RecipeError(f"{name!r} must be 0 or more, or auto, got {value!r}")
