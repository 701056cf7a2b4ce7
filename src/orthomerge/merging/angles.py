"""Model Stock and spherical interpolation: methods that depend on the angles between tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from orthomerge.core.checks import fraction
from orthomerge.core.errors import RecipeError
from orthomerge.merging.elect import scaled_sum
from orthomerge.merging.kinds import Site, Surveyed, Vectors
from orthomerge.merging.statistics import grams

_PARALLEL = 0.9995
_TINY = 1e-8  # smaller norms are replaced by 1 in a denominator


@dataclass(frozen=True)
class ModelStock:
    """Average of the experts, pulled towards the base the more, the wider the angle between their task vectors.

    Jang et al., "Model Stock: all we need is just a few fine-tuned models", 2024, arXiv 2403.19522: per tensor theta =
    t mean_i theta_i + (1 - t) theta_b with t = N cos / (1 + (N - 1) cos). Meant for experts of *one* task: those of
    different tasks are nearly orthogonal, so that t is near 0.

    *Differs from the paper:* cos of more than two models is the mean over all pairs, as in mergekit 0.1.5
    (`model_stock` without `filter_wise`). *Differs from mergekit:* cos is clamped to [0, 1], where a negative mean
    pushes the result past the base, and is 0 only for pairs in which one delta is zero.
    """

    def survey(self, vectors: Vectors) -> Surveyed:
        if len(vectors.tasks) < 2:
            raise RecipeError(
                f"'model_stock' merges at least 2 experts, got {len(vectors.tasks)}; add one, or use 'average'"
            )
        return _weighted_sum({key: _shares(gram) for key, gram in grams(vectors).items()})


@dataclass(frozen=True)
class Slerp:
    """Spherical interpolation of two experts' weights: along the arc between them, not along the chord.

    Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985, on each tensor as one vector, as in
    mergekit 0.1.5 (`slerp`): theta = [sin((1 - t) w) theta_1 + sin(t w) theta_2] / sin(w), w the angle between
    theta_1 and theta_2. Where |cos w| > 0.9995 (most tensors of most fine-tuned models) the interpolation is linear.
    *Differs from mergekit:* the angle is computed in float64, and `base` is neither of the two models.

    `t`: position between the first expert (0) and the second (1).
    """

    t: float = 0.5

    def __post_init__(self) -> None:
        fraction(t=self.t, zero=True)

    def survey(self, vectors: Vectors) -> Surveyed:
        if len(vectors.tasks) != 2:
            raise RecipeError(f"slerp merges exactly 2 experts, got {len(vectors.tasks)}; choose two, or use 'average'")
        return _weighted_sum({key: _arc(gram, self.t) for key, gram in grams(vectors).items()})


def _weighted_sum(coefficients: Mapping[str, tuple[float, ...]]) -> Surveyed:
    """Sum of the base and the deltas with coefficients by tensor name, that of the base first."""

    def merge(base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        of_base, *of_deltas = coefficients[site.key]
        merged = scaled_sum(deltas, tuple(of_deltas))
        return merged.add_(base, alpha=of_base) if of_base else merged

    return Surveyed(merge)


def _shares(gram: torch.Tensor) -> tuple[float, ...]:
    """Coefficients of base and deltas for theta = t mean_i theta_i + (1 - t) theta_b."""
    N, norms = len(gram) - 1, gram.diagonal()[1:].sqrt()
    cosines = (gram[1:, 1:] / norms.outer(norms)).nan_to_num(0.0)  # 0 / 0: a delta that is zero
    pairs: list[float] = cosines[tuple(torch.triu_indices(N, N, 1))].tolist()
    cos = min(max(sum(pairs) / len(pairs), 0.0), 1.0)
    t = N * cos / (1 + (N - 1) * cos)
    return (0.0, *[t / N] * N)


def _arc(gram: torch.Tensor, t: float) -> tuple[float, float, float]:
    """Coefficients of base and deltas for theta = a theta_1 + b theta_2: a + b - 1, a, b."""
    bb, b1, b2 = gram[0].tolist()
    d11, d12, d22 = float(gram[1, 1]), float(gram[1, 2]), float(gram[2, 2])
    norms = [math.sqrt(max(square, 0.0)) for square in (bb + 2 * b1 + d11, bb + 2 * b2 + d22)]
    scale = math.prod(norm if norm > _TINY else 1.0 for norm in norms)
    cos = min(max((bb + b1 + b2 + d12) / scale, -1.0), 1.0)
    if abs(cos) > _PARALLEL:
        return 0.0, 1 - t, t
    w = math.acos(cos)
    a, b = math.sin((1 - t) * w) / math.sin(w), math.sin(t * w) / math.sin(w)
    return a + b - 1, a, b
