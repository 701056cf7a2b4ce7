"""How often values occur, smoothed: a Gaussian kernel density estimate on a grid.

Silverman 1986, Eq. 3.31 for the width of the kernel: h = 0.9 min(deviation, quartile range / 1.34) n^(-1/5).

Where values cannot go beyond `ends`, what a kernel puts beyond one is reflected at it (Silverman 1986, 2.10).

Letters: values v [n], grid g [k]; density(g) = 1/(n h) sum_i phi((g - v_i) / h), whose integral is 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orthomerge.core.errors import NumericalError, RecipeError

POINTS = 161  # of a grid
REACH = 4.0  # kernel widths that a grid goes beyond the values
_LEAST = 1e-3  # width of a kernel, so that equal values are a narrow peak and not an infinite one
_BLOCK = 1 << 20  # numbers held at once


def bandwidth(values: ArrayLike) -> float:
    """h; of values that are all the same, the least there is."""
    v = _checked(values)
    quarter, three = np.quantile(v, [0.25, 0.75])
    sizes = [size for size in (float(v.std()), float(three - quarter) / 1.34) if size > 0]
    return max(0.9 * min(sizes, default=0.0) * math.pow(len(v), -0.2), _LEAST)


def density(
    values: ArrayLike, grid: ArrayLike, *, width: float | None = None, ends: tuple[float, float] | None = None
) -> NDArray[np.float64]:
    """The density of values [n] at the points of a grid [k]; `width`: h, else by `bandwidth`."""
    v, g = _checked(values), np.asarray(grid, dtype=np.float64)
    h = bandwidth(v) if width is None else width
    if not h > 0:
        raise RecipeError(f"'width' of a kernel must be positive, got {h}")
    if ends is not None:
        low, high = ends
        parts = [density(v, points, width=h) for points in (g, 2 * low - g, 2 * high - g)]
        inside: NDArray[np.float64] = np.where((low <= g) & (g <= high), sum(parts), 0.0)
        return inside
    total = np.zeros_like(g)
    step = max(1, _BLOCK // max(len(g), 1))
    for start in range(0, len(v), step):
        z = (g[:, None] - v[None, start : start + step]) / h
        total += np.exp(-0.5 * z * z).sum(1)
    found: NDArray[np.float64] = total / (len(v) * h * math.sqrt(2 * math.pi))
    return found


def span(*parts: ArrayLike, points: int = POINTS, ends: tuple[float, float] | None = None) -> NDArray[np.float64]:
    """A grid that holds the densities of all parts nearly whole, and does not go beyond `ends`."""
    known = [_checked(part) for part in parts]
    reach = [(float(v.min()) - REACH * bandwidth(v), float(v.max()) + REACH * bandwidth(v)) for v in known]
    low, high = min(low for low, _ in reach), max(high for _, high in reach)
    more = REACH * (high - low) / points  # room for kernels as wide as a step of the grid
    low, high = low - more, high + more
    if ends is not None:
        low, high = max(low, ends[0]), min(high, ends[1])
    return np.linspace(low, high, points)


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or not len(v):
        raise RecipeError(f"a density needs a list of at least one value, got {list(v.shape)}")
    if not np.isfinite(v).all():
        raise NumericalError(f"{int((~np.isfinite(v)).sum())} of {len(v)} values are not finite; leave them out first")
    return v
