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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from orthomerge.alignment.aligner import Alignment
from orthomerge.alignment.descent import Adam
from orthomerge.alignment.problem import Problem
from orthomerge.core.checks import at_least_one
from orthomerge.models.extract import device_of
from orthomerge.models.extras import SurgeryHead
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head


@dataclass(frozen=True)
class Surgery:
    """`rank`: r; `steps`, `lr`, `batch`: Adam's; `decay`: the learning rate falls to zero; `seed`: of D and batches.

    `device`: where it is trained.
    """

    rank: int = 16
    steps: int = 1000
    lr: float = 1e-3
    batch: int = 16
    decay: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        at_least_one(rank=self.rank)
        self._adam()

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Facts: the mean absolute distance to the expert's features before and after."""
        module = Module.of(pair, head, self.seed, rank=self.rank, layers=2, device=self.device)
        f, t, (D, U) = module.f, module.t, module.layers

        def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
            x = f[rows]
            h = (x @ D.T).relu_()
            G = (t[rows] - x).add_(h @ U).sign_().div_(x.numel())  # dloss / d(U h)
            return [torch.stack([((G @ U.T) * (h > 0)).T @ x, h.T @ G])]

        name = f"the module of {module.task!r} diverged under surgery"
        module.train(self._adam(), gradients, name=name)
        return module.alignment(head, "surgery")

    def _adam(self) -> Adam:
        return Adam(self.steps, self.lr, self.batch, self.decay, self.seed)


def first_layer(rank: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """A [rank, width] matrix as torch starts its linear layers (Kaiming, a = sqrt 5): uniform up to 1 / sqrt(width)."""
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True, eq=False)
class Module:
    """A module in training, whose layers are one tensor.

    `f`, `t` [n, d] float32; `weights` [layers, r, d]: D, then U and what else there is, both transposed.
    """

    task: str
    f: torch.Tensor
    t: torch.Tensor
    weights: torch.Tensor
    generator: torch.Generator

    @classmethod
    def of(cls, pair: FeaturePair, head: Head, seed: int, *, rank: int, layers: int, device: str) -> Module:
        """Where training starts: all layers but the first are zero."""
        task = Problem.of(pair, head).task  # for its checks
        place, generator = device_of(device), torch.Generator().manual_seed(seed)
        f, t = (values.float().to(place) for values in (pair.merged.values, pair.expert.values))
        weights = torch.zeros(layers, rank, head.width)
        weights[0] = first_layer(rank, head.width, generator)
        return cls(task, f, t, weights.to(place), generator)

    @property
    def layers(self) -> tuple[torch.Tensor, ...]:
        """Views of the weights."""
        return self.weights.unbind()

    def train(self, adam: Adam, gradients: Callable[[torch.Tensor], Sequence[torch.Tensor]], *, name: str) -> None:
        """Change the weights in place."""
        adam.minimise([self.weights], gradients, count=len(self.f), generator=self.generator, name=name)

    def alignment(self, head: Head, kind: str) -> Alignment:
        """What was trained, with the distances before and after."""
        f, t, weights = self.f.cpu(), self.t.cpu(), self.weights.cpu()
        D, U = weights[0].clone(), weights[1].T.contiguous()
        before, after = (distance(each, t) for each in (f, f - (f @ D.T).relu_() @ U.T))
        return Alignment(SurgeryHead(head, D, U, kind), {"loss_before": before, "loss": after})


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over inputs and entries of the absolute difference."""
    return float((one.double() - other.double()).abs().mean())
