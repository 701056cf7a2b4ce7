"""A small module of its own between merged features and head takes off what merging has added to the features.

Yang et al. 2024, "Representation Surgery for Multi-Task Model Merging", arXiv 2402.02705, and its code:

    f' = f - U relu(D f),    Adam on the mean over inputs and entries of |f' - t|,

from U = 0, so that training starts at the merged model. The module is no part of a checkpoint: its tensors are counted
and kept beside the model.

Letters: f, t [n, d] features of the merged encoder and of the expert, as they are, before a head normalises; D [r, d],
U [d, r].
Differs from the paper: one optimiser a task (the authors' single Adam lets idle tasks drift on momentum in old versions
of torch); epochs go through the inputs in turn, where the code draws two batches of a fresh shuffle at each of 500
rounds. Unlabelled inputs are what the caller gives, not the test set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.descent import Adam, at_least_one
from orthomerge.alignment.problem import Problem
from orthomerge.errors import CheckpointError
from orthomerge.features.features import FeaturePair
from orthomerge.heads import Head

__all__ = ["Surgery", "SurgeryHead", "distance", "first_layer", "rebuild"]


@dataclass(frozen=True, eq=False)
class SurgeryHead:
    """The expert's head behind f - U relu(D f): `down` is D [r, d], `up` is U [d, r]."""

    head: Head
    down: torch.Tensor
    up: torch.Tensor
    kind: str = "surgery"

    @property
    def labels(self) -> tuple[str, ...]:
        return self.head.labels

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(features - (features @ self.down.T).relu() @ self.up.T)

    def extra_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor beyond the head's, by name."""
        return {"down": self.down, "up": self.up}


def rebuild(head: Head, tensors: Mapping[str, torch.Tensor], *, kind: str = "surgery") -> SurgeryHead:
    """The classifier from a head and the tensors that were kept beside the model."""
    if set(tensors) != {"down", "up"}:
        raise CheckpointError(f"a {kind} module must hold 'down' and 'up', got {sorted(tensors)}; align again")
    down, up = tensors["down"], tensors["up"]
    if down.ndim != 2 or down.shape[1] != head.width or up.shape != down.shape[::-1]:
        raise CheckpointError(
            f"a {kind} module before a head of width {head.width} must have 'down' [r, {head.width}] and 'up' "
            f"[{head.width}, r], got {tuple(down.shape)} and {tuple(up.shape)}; align again"
        )
    return SurgeryHead(head, down, up, kind)


@dataclass(frozen=True)
class Surgery:
    """`rank`: r; `steps`, `lr`, `batch`: Adam's; `decay`: the learning rate falls to zero; `seed`: of D and batches."""

    rank: int = 16
    steps: int = 1000
    lr: float = 1e-3
    batch: int = 16
    decay: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(rank=self.rank)
        self._adam()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean absolute distance to the expert's features before and after."""
        task = Problem.of(pair, head).task  # for its checks
        f, t, adam = pair.merged.values.float(), pair.expert.values.float(), self._adam()
        generator = adam.generator()
        D = first_layer(self.rank, head.width, generator)
        U = torch.zeros(head.width, self.rank)

        def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
            x = f.index_select(0, rows)
            h = (x @ D.T).relu_()
            G = (t.index_select(0, rows) - x).add_(h @ U.T).sign_().div_(x.numel())  # dloss / d(U h)
            return [((G @ U) * (h > 0)).T @ x, G.T @ h]

        name = f"the module of {task!r} diverged under surgery"
        adam.minimise([D, U], gradients, count=len(f), generator=generator, name=name)
        before, after = (distance(each, t) for each in (f, f - (f @ D.T).relu_() @ U.T))
        return Alignment(SurgeryHead(head, D, U), {"loss_before": before, "loss": after})

    def _adam(self) -> Adam:
        return Adam(self.steps, self.lr, self.batch, self.decay, self.seed)


def first_layer(rank: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """A [rank, width] matrix as torch starts its linear layers (Kaiming, a = sqrt 5): uniform up to 1 / sqrt(width)."""
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over inputs and entries of the absolute difference."""
    return float((one.double() - other.double()).abs().mean())
