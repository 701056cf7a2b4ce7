"""Fingerprints of values, and differences between two results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tests.golden.observe import Value

_ENTRIES = 8
_DIGITS = 7  # of the largest entry

Print = list[Any] | float | str


def fingerprint(value: Value) -> Print:
    """Summary of a tensor: dtype, shape, largest entry, norm, sum and eight entries at fixed places, in float64."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str) else float(f"{value:.{_DIGITS + 1}g}")
    flat = value.detach().to(torch.float64).reshape(-1)
    if flat.numel() == 0:
        return [_dtype(value), list(value.shape), 0.0, 0.0, 0.0]
    places = [number * (flat.numel() - 1) // (_ENTRIES - 1) for number in range(_ENTRIES)]
    largest = float(flat.abs().max())
    decimals = _DIGITS - math.floor(math.log10(largest)) if 0 < largest < math.inf else _DIGITS
    numbers = [largest, float(flat.norm()), float(flat.sum()), *flat[places].tolist()]
    return [_dtype(value), list(value.shape), *(round(number, decimals) for number in numbers)]


def compare_prints(
    expected: Mapping[str, Print], values: Mapping[str, Value], tolerance: float, noise: str | None = None
) -> list[tuple[str, str]]:
    """Names of values that differ, each with what differs; numbers may be off by `tolerance` times the largest entry.

    Norm and sum of n entries may be off by sqrt(n) as much. Of values whose names match `noise` nothing is compared but
    that they are there.
    """
    prints = {name: fingerprint(value) for name, value in values.items()}
    return _compare(expected, prints, lambda one, other: _other_print(one, other, tolerance), noise)


def compare_exactly(old: Mapping[str, Value], new: Mapping[str, Value], tolerance: float) -> list[tuple[str, str]]:
    """The same for whole tensors; a tolerance of 0 asks for the same bytes."""
    return _compare(old, new, lambda one, other: _other_tensor(one, other, tolerance))


def _compare(
    old: Mapping[str, Any], new: Mapping[str, Any], other: Callable[[Any, Any], str | None], noise: str | None = None
) -> list[tuple[str, str]]:
    differences = [(name, "is not there any more") for name in old.keys() - new.keys()]
    differences += [(name, "was not there before") for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        difference = None if noise and re.search(noise, name) else other(old[name], new[name])
        differences += [(name, difference)] if difference else []
    return sorted(differences)


def _other_print(wanted: Print, got: Print, tolerance: float) -> str | None:
    if not isinstance(wanted, list) or not isinstance(got, list) or wanted[:2] != got[:2]:
        return _other_value(wanted, got, tolerance)
    number = math.prod(wanted[1])
    scales = [1.0, math.sqrt(number), math.sqrt(number), *[1.0] * (len(wanted) - 5)]
    off = [abs(a - b) / scale for a, b, scale in zip(wanted[2:], got[2:], scales, strict=True)]
    largest = max(abs(wanted[2]), abs(got[2]))
    worst = max(off) / largest if largest > 0 else 0.0
    return None if worst <= tolerance else f"off by {worst:.1e} of the largest entry"


def _other_tensor(one: Value, other: Value, tolerance: float) -> str | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return _other_value(one, other, tolerance)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{_dtype(other)} {list(other.shape)} instead of {_dtype(one)} {list(one.shape)}"
    if torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
        return None
    a, b = one.to(torch.float64), other.to(torch.float64)
    worst = float((a - b).abs().max()) / max(float(a.abs().max()), float(b.abs().max()), 1e-300)
    return None if tolerance > 0 and worst <= tolerance else f"off by {worst:.1e} of the largest entry"


def _other_value(one: object, other: object, tolerance: float) -> str | None:
    if isinstance(one, float) and isinstance(other, float):
        same = abs(one - other) <= tolerance * max(abs(one), abs(other), 1.0)
    else:
        same = type(one) is type(other) and bool(one == other)
    return None if same else f"{other!r:.200} instead of {one!r:.200}"


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def summary(differences: Sequence[tuple[str, str]], most: int = 3) -> str:
    """The first few, and how many there are."""
    shown = "; ".join(f"{name} {what}" for name, what in differences[:most])
    return shown if len(differences) <= most else f"{shown}; and {len(differences) - most} more"
