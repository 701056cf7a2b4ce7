"""Direction and length of merged features beside the expert's, input by input: cosine and coefficient.

MOMA, arXiv 2412.13526 v3, Section 3.4 and Figures 5 and 7, after Zhou et al. 2024 (cross-task linearity):

    cos(u, v) = u.v / (|u| |v|),    coef(u, v) = u.v / |v|^2.

Letters: u [n, d] merged features, raw or mapped, v [n, d] the expert's of the same inputs. A coefficient of 1 says that
u is as long as v along v. The paper does not say which of the two is v; Zhou et al. divide by the reference, as here.

A vector of zeros has no direction: NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.analysis.checking import matched
from orthomerge.analysis.density import bandwidth, density, span
from orthomerge.analysis.figures import Bars, Curve, Lines, Series
from orthomerge.core.errors import RecipeError

SHOWN = {"none": "raw", "orthogonal": "orthogonal", "linear": "linear"}
_HELD_OUT = "Maps were fitted on {fitted} inputs, and measured on test inputs that they have not seen."


@dataclass(frozen=True)
class Geometry:
    """Cosine and coefficient of every test input [n]."""

    cosine: NDArray[np.float64]
    coefficient: NDArray[np.float64]


def cosine(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The cosine of every row, [n] in float64."""
    u, v = matched(u, v, what="two sets of features")
    found: torch.Tensor = (u * v).sum(1) / (u.norm(dim=1) * v.norm(dim=1))
    return found


def coefficient(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The coefficient of every row, [n] in float64."""
    u, v = matched(u, v, what="two sets of features")
    return (u * v).sum(1) / v.square().sum(1)


def procrustes_distance(u: torch.Tensor, v: torch.Tensor) -> float:
    """How far two sets of features are apart once shift, scale and rotation are taken off: 0 to 1.

    1 - (sum of the singular values of u^T v)^2, both centred and of norm 1 (Gower 1975). NaN where one is constant.
    """
    u, v = matched(u, v, what="two sets of features", least=2, same_width=False)
    u, v = u - u.mean(0), v - v.mean(0)
    sizes = float(u.norm() * v.norm())
    if sizes == 0:
        return float("nan")
    return max(0.0, 1.0 - float(torch.linalg.svdvals(u.T @ v).sum() / sizes) ** 2)


def measure(merged: torch.Tensor, expert: torch.Tensor) -> Geometry:
    """Of merged features, raw or mapped, and the expert's."""
    return Geometry(cosine(merged, expert).numpy(), coefficient(merged, expert).numpy())


def geometry_figures(found: Mapping[str, Mapping[str, Geometry]], *, fitted: str) -> tuple[Lines | Bars, ...]:
    """From measures by task and family: densities over all tasks, each counting alike, and medians by task.

    `fitted`: the split that maps were fitted on.
    """
    if not found:
        raise RecipeError("the geometry of no task cannot be drawn; give at least one")
    held_out = _HELD_OUT.format(fitted=fitted)
    cosines = {kind: {task: _kept(by[kind].cosine) for task, by in found.items()} for kind in SHOWN}
    lengths = {kind: {task: _kept(by[kind].coefficient) for task, by in found.items()} for kind in SHOWN}
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
        _medians(cosines, held_out),
    )


def _kept(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _curves(
    values: Mapping[str, Mapping[str, NDArray[np.float64]]], *, ends: tuple[float, float] | None = None
) -> tuple[Curve, ...]:
    """A density of every family: the mean of the tasks' densities."""
    curves = []
    for kind, by_task in values.items():
        parts = [part for part in by_task.values() if len(part)]
        if parts:
            grid = span(*parts, ends=ends)
            step = float(grid[1] - grid[0])  # a narrower peak would fall between two points
            height = np.mean(
                [density(part, grid, width=max(bandwidth(part), step), ends=ends) for part in parts], axis=0
            )
            curves.append(Curve(SHOWN[kind], _short(grid), _short(height)))
    return tuple(curves)


def _medians(values: Mapping[str, Mapping[str, NDArray[np.float64]]], held_out: str) -> Bars:
    series = []
    for kind, by_task in values.items():
        quarters = [np.quantile(part, [0.25, 0.5, 0.75]) if len(part) else [np.nan] * 3 for part in by_task.values()]
        low, middle, high = (_short(column) for column in np.array(quarters).T)
        series.append(Series(SHOWN[kind], middle, low, high))
    tasks = tuple(next(iter(values.values())))
    caption = f"Median cosine between merged and expert features; bars reach from quarter to quarter. {held_out}"
    return Bars("cosine-by-task", "Direction by task", caption, tasks, "cosine", tuple(series))


def _short(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)
