"""Checks of hyper-parameters, and sums that take one number for all experts or one for each."""

import math
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from orthomerge.core.errors import RecipeError, nearest

_LARGEST = 3.4e38  # of float32
PerExpert = float | tuple[float, ...]


def finite(name: str, value: PerExpert) -> None:
    """Refuse NaN, infinity, and what is infinite in float32, in which weights are merged."""
    for number in value if isinstance(value, tuple) else (value,):
        if not math.isfinite(number):
            raise RecipeError(f"{name!r} must be a finite number, got {number}")
        if abs(number) > _LARGEST:
            raise RecipeError(f"{name!r} must be at most {_LARGEST:.1e} in magnitude, got {number:.1e}")


def fraction(name: str, value: float, *, zero: bool = False, one: bool = True) -> None:
    """Refuse what is not a share: (0, 1] unless told otherwise."""
    inside = (value >= 0 if zero else value > 0) and (value <= 1 if one else value < 1)
    if not inside:
        span = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise RecipeError(f"{name!r} must be in {span}, got {value}")


def choices(method: object) -> None:
    """Refuse a value of a `Literal` field that is none of its alternatives."""
    for name, kind in get_type_hints(type(method)).items():
        if get_origin(kind) is Literal and (value := getattr(method, name)) not in get_args(kind):
            *others, last = map(str, get_args(kind))
            hint = nearest(str(value), get_args(kind))
            raise RecipeError(f"{name!r} must be {', '.join(others)} or {last}, got {value!r}; {hint}")


def per_expert(value: PerExpert, count: int) -> tuple[float, ...]:
    """One number for each of `count` experts."""
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        raise RecipeError(f"{len(value)} numbers were given for {count} experts; give one, or one each")
    return value


def column(value: PerExpert, deltas: torch.Tensor) -> torch.Tensor:
    """The experts' numbers shaped to multiply `deltas` [T, ...]."""
    numbers = torch.tensor(per_expert(value, len(deltas)), dtype=deltas.dtype, device=deltas.device)
    return numbers.reshape(-1, *(1,) * (deltas.ndim - 1))


def scaled_sum(deltas: torch.Tensor, scale: PerExpert) -> torch.Tensor:
    """sum_t scale_t * deltas[t], added in the experts' order."""
    numbers = per_expert(scale, len(deltas))
    total = deltas[0] * numbers[0]
    for delta, number in zip(deltas[1:], numbers[1:], strict=True):
        total.add_(delta, alpha=number)
    return total
