"""TIES with each tensor trimmed on its own, so that no layer is emptied by the others.

Yadav et al., "TIES-merging", 2023, arXiv 2306.01708, for the election and the disjoint mean.

*Differs from the paper:* the `density` share is taken of every tensor, not of the whole vector; biases and
norms keep as large a part of themselves as the embeddings do. Ties and zero sums as in `Ties`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.elect import disjoint_mean, elect_sign, trim
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction
from orthomerge.merging.tensor_quantiles import Thresholds, tensor_quantiles

__all__ = ["TiesPerTensor", "tensor_thresholds"]


@dataclass(frozen=True)
class TiesPerTensor:
    """`density`: share of each tensor's entries that survive the trim; `scale`: lambda."""

    density: float = 0.2
    scale: float = 1.0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("scale", self.scale)

    def survey(self, vectors: Vectors) -> TensorMethod:
        return _TiesPerTensor(tensor_thresholds(vectors, self.density), self.scale)


@dataclass(frozen=True)
class _TiesPerTensor:
    """TIES with the magnitude from which on each expert's entries are kept, by tensor."""

    thresholds: Mapping[str, Thresholds]
    scale: float

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = trim(deltas, self.thresholds[site.key])
        return disjoint_mean(rows, elect_sign(rows)).mul_(self.scale)


def tensor_thresholds(vectors: Vectors, density: float, *, least: int = 0) -> dict[str, Thresholds]:
    """Each tensor's int(density * count)-th largest magnitude, `least` at the least; 0 at density 1."""
    if density >= 1:
        return dict.fromkeys(vectors.shapes, (0.0,) * len(vectors.tasks))
    found = tensor_quantiles(vectors, lambda count: (max(least, int(density * count)),))
    return {key: thresholds for key, (thresholds,) in found.items()}
