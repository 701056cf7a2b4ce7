"""Classify by the smallest mean distance to the support inputs of a class.

"KNN Eval" of "Rethink the Evaluation Protocol of Model Merging on Classification Task" (FT-Classifier, Eq. 5): the
prediction is the class c with the smallest *mean Euclidean distance* to all its anchors,

    D_c(x) = 1/|A_c| sum over a in A_c of ||x - a||,    logits = -D.

That is neither k-nearest-neighbour, in spite of the name, nor the nearest centroid.
Letters: x [n, d] features, A [S, d] support (S anchors, sorted by class), D [n, C].
Differs from the paper: the last batch is not dropped; a class without support is at distance infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from orthomerge.evaluation.protocols import Evidence, Need

_MOST = 1 << 22  # distances in memory at once: 32 MiB


@dataclass(frozen=True)
class Knn:
    """Smallest mean distance, without options: all support inputs of a class have the same weight."""

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "labels"})

    def build(self, evidence: Evidence) -> MeanDistance:
        support, labels = evidence.labelled("knn")
        order = labels.argsort(stable=True)
        counts = labels.bincount(minlength=len(evidence.head.labels))
        return MeanDistance(support.values[order], tuple(counts.tolist()), evidence.head.labels)


@dataclass(frozen=True)
class MeanDistance:
    """Minus the mean distance to each class's anchors; `anchors` [S, d] are sorted by class, `counts` [C] of each."""

    anchors: torch.Tensor
    counts: tuple[int, ...]
    labels: tuple[str, ...]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        # |x|^2 + |a|^2 - 2 x.a loses digits by cancellation: float64 and centring at the anchors' mean keep enough.
        anchors = self.anchors.to(features.device, torch.float64)
        middle = anchors.mean(0)
        blocks = torch.split(features, max(1, _MOST // len(anchors)))
        return torch.cat([-self._mean_distances(block.double() - middle, anchors - middle) for block in blocks]).float()

    def _mean_distances(self, rows: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        means = rows.new_full((len(rows), len(self.counts)), torch.inf)
        for number, part in enumerate(torch.split(torch.cdist(rows, anchors), list(self.counts), dim=1)):
            if part.shape[1]:
                means[:, number] = part.mean(1)
        return means
