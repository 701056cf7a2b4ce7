"""Direction and length of merged features relative to the expert's, per input: cosine and coefficient.

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

from orthomerge.analysis.diagnosis import Bars, Curve, Lines, Series

SHOWN = {"none": "raw", "orthogonal": "orthogonal", "linear": "linear"}  # families of maps, and their names in figures
_BINS = 40
_LEAST = 1e-3  # half the width of a histogram of equal values

Values = NDArray[np.float64]


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
    """Make figures of histograms, with equal weight per task, and of medians by task. `fitted`: split of the maps."""
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
            _histograms(cosines),
        ),
        Lines(
            "coefficient",
            "Length of merged features",
            f"Merged features along the expert's, as a share of its length; 1 is the same length. {held_out}",
            "coefficient",
            "density",
            _histograms(lengths),
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


def _histograms(values: Mapping[str, Mapping[str, Values]]) -> tuple[Curve, ...]:
    curves = []
    for kind, by_task in values.items():
        parts = [part for part in by_task.values() if len(part)]
        if parts:
            joined = np.concatenate(parts)
            weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in parts])
            ends = (joined.min() - _LEAST, joined.max() + _LEAST)
            heights, edges = np.histogram(joined, _BINS, ends, density=True, weights=weights)
            curves.append(Curve(SHOWN[kind], _short((edges[:-1] + edges[1:]) / 2), _short(heights)))
    return tuple(curves)


def _quartiles(name: str, by_task: Mapping[str, Values]) -> Series:
    quarters = [np.quantile(part, [0.25, 0.5, 0.75]) if len(part) else [np.nan] * 3 for part in by_task.values()]
    low, median, high = map(_short, np.array(quarters).T)
    return Series(name, median, low, high)


def _short(values: Values) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)
