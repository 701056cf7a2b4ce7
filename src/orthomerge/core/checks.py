"""Checks of numbers and sizes of options."""

import math
import re
from typing import Literal, get_args, get_origin, get_type_hints

from orthomerge.core.errors import RecipeError, nearest

_LARGEST = 3.4e38  # of float32
_MOST_SIZE = 1 << 62
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def at_least_one(**counts: int | None) -> None:
    """Refuse counts below one; None is allowed."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise RecipeError(f"{name!r} must be at least 1, got {count}")


def positive(**numbers: float) -> None:
    """Refuse numbers that are not positive and finite."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise RecipeError(f"{name!r} must be positive, got {number}")


def not_negative(**numbers: float) -> None:
    """Refuse numbers that are below zero, infinite or NaN."""
    finite(**numbers)
    for name, number in numbers.items():
        if number < 0:
            raise RecipeError(f"{name!r} must be at least 0, got {number}")


def finite(**numbers: float | tuple[float, ...]) -> None:
    """Refuse NaN, infinity, and numbers that are infinite in float32, also in a tuple of them."""
    for name, value in numbers.items():
        for number in value if isinstance(value, tuple) else (value,):
            if not math.isfinite(number):
                raise RecipeError(f"{name!r} must be a finite number, got {number}")
            if abs(number) > _LARGEST:
                raise RecipeError(f"{name!r} must be at most {_LARGEST:.1e} in magnitude, got {number:.1e}")


def fraction(*, zero: bool = False, one: bool = True, **shares: float) -> None:
    """Refuse a number outside of (0, 1]. `zero`, `one`: whether these ends belong to the interval."""
    for name, value in shares.items():
        inside = (value >= 0 if zero else value > 0) and (value <= 1 if one else value < 1)
        if not inside:
            span = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
            raise RecipeError(f"{name!r} must be in {span}, got {value}")


def choices(options: object) -> None:
    """Refuse values of `Literal` fields of a dataclass that are not among their alternatives."""
    for name, kind in get_type_hints(type(options)).items():
        if get_origin(kind) is Literal and (value := getattr(options, name)) not in get_args(kind):
            *others, last = map(str, get_args(kind))
            hint = nearest(str(value), get_args(kind))
            raise RecipeError(f"{name!r} must be {', '.join(others)} or {last}, got {value!r}; {hint}")


def parse_size(size: str | int) -> int:
    """Convert `5GB`, `100MiB` or a plain number to bytes."""
    text = str(size) if isinstance(size, str) or abs(size) < _MOST_SIZE else "a very large number"
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else "?"
    count = float(match.group(1)) * _UNITS.get(unit, 0) if match else 0
    if not 1 <= count < _MOST_SIZE:
        units = ", ".join(filter(None, _UNITS))
        raise RecipeError(f"a size must look like 5GB, 100MiB or 123456, got {text!r:.60}; known units: {units}")
    return int(count)
