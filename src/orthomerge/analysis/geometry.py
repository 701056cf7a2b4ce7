"""Direction and length of merged features relative to the expert's, per input: cosine and coefficient.

MOMA, arXiv 2412.13526 v3, Section 3.4 and Figures 5 and 7, after Zhou et al. 2024 (cross-task linearity):

    cos(u, v) = u.v / (|u| |v|),    coef(u, v) = u.v / |v|^2.

Letters: u [n, d] merged features, raw or mapped, v [n, d] the expert's of the same inputs. A coefficient of 1 says that
u is as long as v along v. The paper does not say which of the two is v; Zhou et al. divide by the reference, as here.
A vector of zeros has no direction: NaN.

Densities are Gaussian kernel estimates whose width is Silverman's (1986, Eq. 3.31),
h = 0.9 min(deviation, quartile range / 1.34) n^(-1/5); density beyond an end of the range is reflected at that end
(Section 2.10).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.analysis.diagnosis import Bars, Curve, Lines, Series

SHOWN = {"none": "raw", "orthogonal": "orthogonal", "linear": "linear"}  # families of maps, and their names in figures
_GRID_POINTS = 161
_REACH = 4.0  # kernel widths between the outermost value and the end of the grid
_LEAST_WIDTH = 1e-3  # of a kernel: equal values give a narrow peak, not an infinite one

Values = NDArray[np.float64]
Ends = tuple[float, float]


@dataclass(frozen=True)
class Geometry:
    """Cosine and coefficient of every test input [n]."""

    cosine: Values
    coefficient: Values

    @classmethod
    def of(cls, merged: torch.Tensor, expert: torch.Tensor) -> Geometry:
        u, v = merged.double(), expert.double()
        products = (u * v).sum(1)
        cosine = products / (u.norm(dim=1) * v.norm(dim=1))
        return cls(cosine.numpy(), (products / v.square().sum(1)).numpy())


def geometry_figures(geometries: Mapping[str, Mapping[str, Geometry]], *, fitted: str) -> tuple[Lines | Bars, ...]:
    """Make figures of densities, with equal weight per task, and of medians by task. `fitted`: split of the maps."""
    held_out = f"Maps were fitted on {fitted} inputs, and measured on test inputs that they have not seen."
    cosines = {kind: {task: _finite(maps[kind].cosine) for task, maps in geometries.items()} for kind in SHOWN}
    lengths = {kind: {task: _finite(maps[kind].coefficient) for task, maps in geometries.items()} for kind in SHOWN}
    return (
        Lines(
            "cosine",
            "Direction of merged features",
            f"Cosine between merged and expert features of one input; 1 is the same direction. {held_out}",
            "cosine",
            "density",
            _curves(cosines, ends=(-1.0, 1.0)),
        ),
        Lines(
            "coefficient",
            "Length of merged features",
            f"Merged features along the expert's, as a share of its length; 1 is the same length. {held_out}",
            "coefficient",
            "density",
            _curves(lengths),
        ),
        Bars(
            "cosine-by-task",
            "Direction by task",
            f"Median cosine between merged and expert features; bars reach from quarter to quarter. {held_out}",
            tuple(geometries),
            "cosine",
            tuple(_quartiles(SHOWN[kind], by_task) for kind, by_task in cosines.items()),
        ),
    )


def _finite(values: Values) -> Values:
    return values[np.isfinite(values)]


def _curves(values: Mapping[str, Mapping[str, Values]], *, ends: Ends | None = None) -> tuple[Curve, ...]:
    curves = []
    for kind, by_task in values.items():
        parts = [part for part in by_task.values() if len(part)]
        if parts:
            grid = span(*parts, ends=ends)
            step = float(grid[1] - grid[0])  # a narrower peak would fall between two points
            densities = [density(part, grid, width=max(bandwidth(part), step), ends=ends) for part in parts]
            curves.append(Curve(SHOWN[kind], _short(grid), _short(np.mean(densities, axis=0))))
    return tuple(curves)


def _quartiles(name: str, by_task: Mapping[str, Values]) -> Series:
    quarters = [np.quantile(part, [0.25, 0.5, 0.75]) if len(part) else [np.nan] * 3 for part in by_task.values()]
    low, median, high = map(_short, np.array(quarters).T)
    return Series(name, median, low, high)


def bandwidth(values: Values) -> float:
    """Return the width h of the kernel."""
    low, high = np.quantile(values, [0.25, 0.75])
    sizes = [size for size in (float(values.std()), float(high - low) / 1.34) if size > 0]
    return max(0.9 * min(sizes, default=0.0) * math.pow(len(values), -0.2), _LEAST_WIDTH)


def density(values: Values, grid: Values, *, width: float, ends: Ends | None = None) -> Values:
    """Estimate 1/(n h) sum_i phi((g - v_i) / h) of values v [n] at the points g of a grid [k]; `width`: h."""
    if ends is not None:
        low, high = ends
        reflected = sum(density(values, points, width=width) for points in (grid, 2 * low - grid, 2 * high - grid))
        return np.where((low <= grid) & (grid <= high), reflected, 0.0)
    sums = [float(np.exp(-0.5 * ((point - values) / width) ** 2).sum()) for point in grid]
    return np.array(sums) / (len(values) * width * math.sqrt(2 * math.pi))


def span(*parts: Values, points: int = _GRID_POINTS, ends: Ends | None = None) -> Values:
    """Return a grid that covers the densities of all parts, within `ends`."""
    low = min(float(part.min()) - _REACH * bandwidth(part) for part in parts)
    high = max(float(part.max()) + _REACH * bandwidth(part) for part in parts)
    margin = _REACH * (high - low) / points  # room for kernels as wide as a step of the grid
    low, high = low - margin, high + margin
    if ends is not None:
        low, high = max(low, ends[0]), min(high, ends[1])
    return np.linspace(low, high, points)


def _short(values: Values) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)
