"""Spherical interpolation of two experts' weights: along the arc between them, not along the chord.

Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985, on each tensor as one vector, as in
mergekit 0.1.5 (`slerp`): theta = [sin((1 - t) w) theta_1 + sin(t w) theta_2] / sin(w), w the angle between
theta_1 and theta_2. Where the two are nearly parallel or opposite (|cos w| > 0.9995, which is most tensors of
most fine-tuned models) the interpolation is linear.

*Differs from mergekit:* the angle is computed in float64. There `base_model` names one of the two models;
here both are experts, and the base only says what the deltas are measured from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import fraction
from orthomerge.merging.statistics import grams

_PARALLEL = 0.9995
_TINY = 1e-8  # norms up to this are not divided by


@dataclass(frozen=True)
class Slerp:
    """`t`: how far to go from the first expert (0) to the second (1)."""

    t: float = 0.5

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("t", self.t, zero=True)

    def survey(self, vectors: Vectors) -> TensorMethod:
        if len(vectors.tasks) != 2:
            raise RecipeError(f"slerp merges exactly 2 experts, got {len(vectors.tasks)}; choose two, or use 'average'")
        return _Slerp({key: _coefficients(gram, self.t) for key, gram in grams(vectors).items()})


@dataclass(frozen=True)
class _Slerp:
    """Spherical interpolation with what each tensor's base and deltas are multiplied with."""

    coefficients: Mapping[str, tuple[float, float, float]]

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        of_base, first, second = self.coefficients[site.key]
        merged = (deltas[0] * first).add_(deltas[1], alpha=second)
        return merged.add_(base, alpha=of_base) if of_base else merged


def _coefficients(gram: torch.Tensor, t: float) -> tuple[float, float, float]:
    """With theta = a theta_1 + b theta_2: a + b - 1 for the base (it is added to the result), then a, b."""
    bb, b1, b2 = gram[0].tolist()
    d11, d12, d22 = float(gram[1, 1]), float(gram[1, 2]), float(gram[2, 2])
    norms = _norm(bb + 2 * b1 + d11) * _norm(bb + 2 * b2 + d22)
    cos = min(max((bb + b1 + b2 + d12) / norms, -1.0), 1.0)
    if abs(cos) > _PARALLEL:
        return 0.0, 1 - t, t
    w = math.acos(cos)
    a, b = math.sin((1 - t) * w) / math.sin(w), math.sin(t * w) / math.sin(w)
    return a + b - 1, a, b


def _norm(square: float) -> float:
    norm = math.sqrt(max(square, 0.0))
    return norm if norm > _TINY else 1.0
