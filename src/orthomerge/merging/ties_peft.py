"""TIES as PEFT reads it: trim each tensor, elect, weigh, divide by the count of those that agree.

peft 0.21, `peft.utils.merge_utils.ties` with `majority_sign_method="total"`; Yadav et al., "TIES-merging",
2023, arXiv 2306.01708.

*Differs from the paper:* the trim is per tensor; the weights come after the election and are not divided out,
so three experts at weight 1/3 give a third of the paper's result. A sum of exactly zero elects plus.

*Differs from PEFT:* it keeps exactly k entries, and which of several equal ones depends on `topk`; here all
entries as large as the k-th are kept. PEFT merges the factors of LoRA adapters, this merges any task vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.merging.elect import disjoint_mean, elect_sign, trim
from orthomerge.merging.kinds import Scope, Site, TensorMethod, Vectors
from orthomerge.merging.options import finite, fraction, per_expert
from orthomerge.merging.tensor_quantiles import Thresholds
from orthomerge.merging.ties_per_tensor import tensor_thresholds

__all__ = ["TiesPeft"]


@dataclass(frozen=True)
class TiesPeft:
    """`density`: share of each tensor that survives the trim; `weights`: one an expert, 1 unless given."""

    density: float = 0.2
    weights: tuple[float, ...] | None = None

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        fraction("density", self.density)
        finite("weights", self.weights or 1.0)

    def survey(self, vectors: Vectors) -> TensorMethod:
        weights = per_expert(1.0 if self.weights is None else self.weights, len(vectors.tasks))
        return _TiesPeft(tensor_thresholds(vectors, self.density), weights)


@dataclass(frozen=True)
class _TiesPeft:
    """PEFT's TIES with the magnitude from which on each expert's entries are kept, by tensor."""

    thresholds: Mapping[str, Thresholds]
    weights: tuple[float, ...]

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        rows = trim(deltas, self.thresholds[site.key])
        return disjoint_mean(rows, elect_sign(rows), factors=self.weights)
