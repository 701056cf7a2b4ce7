"""TIES-merging as in the paper: trim over the whole model, elect a sign, average those that agree.

Yadav et al., "TIES-merging: resolving interference when merging models", 2023, arXiv 2306.01708: theta =
theta_b + lambda * mean over {t : sign(tau_t) = elected} of trimmed tau_t, where each tau_t keeps the
`density` share of entries that is largest in magnitude among all its tensors.

*Differs from the paper:* where the trimmed entries cancel to exactly zero (+a, -a) the elected sign is plus,
as in mergekit and PEFT; the authors' code takes the sign that wins most coordinates of the model. Entries as
large as the k-th largest are all kept, k = int(density * count); the authors' code compares with the next
smaller one and so keeps one entry more (`TiesFusionBench` does that too).
"""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from orthomerge.merging.elect import disjoint_mean, elect_sign, trim
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction
from orthomerge.merging.select import kth_largest_streamed

__all__ = ["Ties", "count_elements", "model_thresholds"]


@dataclass(frozen=True)
class Ties:
    """`density`: share of entries that survive the trim; `scale`: lambda (about 1 for a disjoint mean)."""

    density: float = 0.2
    scale: float = 1.0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("scale", self.scale)

    def survey(self, vectors: Vectors) -> TensorMethod:
        return _Ties(model_thresholds(vectors, self.density), self.scale)


@dataclass(frozen=True)
class _Ties:
    """TIES with the magnitude from which on each expert's entries are kept."""

    thresholds: tuple[float, ...]
    scale: float

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = trim(deltas, self.thresholds)
        return disjoint_mean(rows, elect_sign(rows)).mul_(self.scale)


def count_elements(vectors: Vectors) -> int:
    """How many elements each task vector has."""
    return sum(prod(shape) for shape in vectors.shapes.values())


def model_thresholds(vectors: Vectors, density: float, *, extra: int = 0) -> tuple[float, ...]:
    """Each expert's (int(density * count) + extra)-th largest magnitude over all tensors; 0 at density 1."""
    if density >= 1:
        return (0.0,) * len(vectors.tasks)
    count = count_elements(vectors)
    return kth_largest_streamed(
        lambda: (block.deltas for block in vectors.blocks()),
        (int(density * count) + extra,) * len(vectors.tasks),
        sample=vectors.sample(),
        count=count,
    )
