"""DARE before TIES: drop at random, enlarge, trim over the whole model, elect, add those that agree.

Yu et al., "Language models are super Mario", 2023, arXiv 2311.03099, section 4.3, with the defaults of
FusionBench (disjoint sum, lambda 0.5); TIES is Yadav et al. 2023, arXiv 2306.01708.

*Differs from the paper:* the paper leaves the TIES that follows open; here it is the disjoint sum of
`TiesSum`. The trim counts dropped entries as the zeros they are: with `density` above 1 - `drop` it keeps
everything that was not dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.dare import drop
from orthomerge.merging.elect import disjoint_sum, elect_sign, trim
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction
from orthomerge.merging.select import kth_largest_streamed
from orthomerge.merging.ties import count_elements

__all__ = ["DareTies"]


@dataclass(frozen=True)
class DareTies:
    """`drop`: p; `density`: share that survives the trim; `scale`: lambda; `seed` fixes what is dropped."""

    drop: float = 0.5
    density: float = 0.2
    scale: float = 0.5
    seed: int = 0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("drop", self.drop, zero=True, one=False)
        fraction("density", self.density)
        finite("scale", self.scale)

    def survey(self, vectors: Vectors) -> TensorMethod:
        return _DareTies(self._thresholds(vectors), 1 - self.drop, self.scale, self.seed)

    def _thresholds(self, vectors: Vectors) -> tuple[float, ...]:
        """Of the dropped vectors before they are enlarged: dividing all by 1 - p changes no order."""
        if self.density >= 1:
            return (0.0,) * len(vectors.tasks)
        keep = 1 - self.drop

        def stream() -> Iterator[torch.Tensor]:
            for block in vectors.blocks():
                yield torch.stack(drop(block.deltas, block.site, keep=keep, seed=self.seed))

        def sample() -> Iterator[torch.Tensor]:
            start = 0  # a sample does not say where it lies: any mask of the same density will do
            for run in vectors.sample():
                site = Site("", run.shape[1:], start, vectors.tasks)
                yield torch.stack(drop(run, site, keep=keep, seed=self.seed))
                start += run.shape[1]

        count = count_elements(vectors)
        ranks = (int(self.density * count),) * len(vectors.tasks)
        return kth_largest_streamed(stream, ranks, sample=sample(), count=count)


@dataclass(frozen=True)
class _DareTies:
    """DARE and TIES with the magnitude from which on each expert's entries are kept."""

    thresholds: tuple[float, ...]
    keep: float
    scale: float
    seed: int

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = trim(drop(deltas, site, keep=self.keep, seed=self.seed), self.thresholds)
        return disjoint_sum(rows, elect_sign(rows)).mul_(self.scale / self.keep)
