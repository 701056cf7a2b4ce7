"""Strengths of a prior: what they may be, and which of several is taken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    import torch


def strength(name: str, value: float | Literal["auto"]) -> None:
    """A strength is 0 or more, infinity for "change nothing", or `auto`."""
    if value != "auto" and (math.isnan(value) or value < 0):
        raise RecipeError(f"{name!r} must be 0 or more, or auto, got {value!r}")


def careful(losses: torch.Tensor) -> int:
    """Of choices [k, n], from careful to bold, the first whose mean over n is within one standard error of the best."""
    excess = losses - losses[int(losses.mean(1).argmin())]
    near = excess.mean(1) <= excess.std(1, correction=1) / math.sqrt(losses.shape[1])
    return int(near.nonzero()[0])
