"""Model Stock: pull the average of the experts towards the base, the more the wider the angle between them.

Jang et al., "Model Stock: all we need is just a few fine-tuned models", 2024, arXiv 2403.19522: per tensor
theta = t mean_i theta_i + (1 - t) theta_b with t = N cos / (1 + (N - 1) cos). Meant for experts of *one*
task: those of different tasks are nearly orthogonal, t is near 0, and what comes out is near the base.

*Differs from the paper:* the paper gives cos for two models; for more it is the mean over all pairs, as in
mergekit 0.1.5 (`model_stock` without `filter_wise`). It is clamped to [0, 1]: in mergekit a negative mean
pushes the result past the base, away from the experts. A pair in which one delta is zero counts as cos = 0;
mergekit also shrinks the cosine of pairs whose norms multiply to less than 1e-6, here tiny deltas count like
others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import scaled_sum
from orthomerge.merging.statistics import grams


@dataclass(frozen=True)
class ModelStock:
    """Has no hyper-parameters: the angle decides."""

    scope: ClassVar[Scope] = "element"

    def survey(self, vectors: Vectors) -> TensorMethod:
        if len(vectors.tasks) < 2:
            raise RecipeError(
                "model stock needs at least 2 experts, whose angle decides, got 1; add one, or use 'average'"
            )
        return _ModelStock({key: _ratio(gram) for key, gram in grams(vectors).items()})


@dataclass(frozen=True)
class _ModelStock:
    """Model Stock with the ratio t of each tensor."""

    ratios: Mapping[str, float]

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return scaled_sum(deltas, self.ratios[site.key] / len(deltas))


def _ratio(gram: torch.Tensor) -> float:
    """The ratio t from the Gram matrix of base and deltas."""
    N = len(gram) - 1
    pairs = [_cosine(gram, i, j) for i, j in combinations(range(1, N + 1), 2)]
    cos = min(max(sum(pairs) / len(pairs), 0.0), 1.0)
    return N * cos / (1 + (N - 1) * cos)


def _cosine(gram: torch.Tensor, i: int, j: int) -> float:
    norms = float(gram[i, i].sqrt() * gram[j, j].sqrt())
    return float(gram[i, j]) / norms if norms > 0 else 0.0
