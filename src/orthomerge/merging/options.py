"""Checks of hyper-parameters, and numbers that are given once for all experts or once per expert."""

import math
from typing import Literal, get_args, get_origin, get_type_hints

from orthomerge.core.errors import RecipeError, nearest

_LARGEST = 3.4e38  # of float32
PerExpert = float | tuple[float, ...]


def finite(name: str, value: PerExpert) -> None:
    """Refuse NaN, infinity, and numbers that are infinite in float32, the dtype of the merge."""
    for number in value if isinstance(value, tuple) else (value,):
        if not math.isfinite(number):
            raise RecipeError(f"{name!r} must be a finite number, got {number}")
        if abs(number) > _LARGEST:
            raise RecipeError(f"{name!r} must be at most {_LARGEST:.1e} in magnitude, got {number:.1e}")


def fraction(name: str, value: float, *, zero: bool = False, one: bool = True) -> None:
    """Refuse a number outside of (0, 1]; `zero` and `one` say which ends belong to the interval."""
    inside = (value >= 0 if zero else value > 0) and (value <= 1 if one else value < 1)
    if not inside:
        span = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise RecipeError(f"{name!r} must be in {span}, got {value}")


def choices(method: object) -> None:
    """Refuse a value of a `Literal` field that is not one of its alternatives."""
    for name, kind in get_type_hints(type(method)).items():
        if get_origin(kind) is Literal and (value := getattr(method, name)) not in get_args(kind):
            *others, last = map(str, get_args(kind))
            hint = nearest(str(value), get_args(kind))
            raise RecipeError(f"{name!r} must be {', '.join(others)} or {last}, got {value!r}; {hint}")


def per_expert(value: PerExpert, count: int) -> tuple[float, ...]:
    """One number per expert."""
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        raise RecipeError(f"{len(value)} numbers were given for {count} experts; give one, or one each")
    return value
