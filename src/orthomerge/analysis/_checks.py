"""Checks that measures of features share: matrices of finite numbers whose rows belong together."""

from __future__ import annotations

import torch

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError


def checked(values: torch.Tensor, *, what: str, least: int = 1) -> torch.Tensor:
    """Features [n, d] in float64: a matrix of at least `least` rows, all finite."""
    if values.ndim != 2 or not values.shape[1]:
        raise IncompatibleError(f"{what} must be [n, d], got {list(values.shape)}")
    if len(values) < least:
        raise RecipeError(f"{what} must have at least {least} rows, got {len(values)}; give more inputs")
    finite = values.isfinite().all(1)
    if not finite.all():
        raise NumericalError(
            f"{int((~finite).sum())} of {len(values)} rows of {what} are NaN or infinite; "
            "check the encoder that made them"
        )
    return values.double()


def paired(
    one: torch.Tensor, other: torch.Tensor, *, what: str, least: int = 1, same_width: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64, one row of each per input."""
    first, second = checked(one, what=what, least=least), checked(other, what=what, least=least)
    if len(first) != len(second) or (same_width and first.shape != second.shape):
        raise IncompatibleError(
            f"{what} must be of the same inputs{' and as wide' if same_width else ''}, "
            f"got {list(one.shape)} and {list(other.shape)}"
        )
    return first, second
