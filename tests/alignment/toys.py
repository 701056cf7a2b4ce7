"""Small pairs of features and heads of every kind, and Adam by torch and autograd to hold ours against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import kl_div, log_softmax

from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head, Linear

HEADS = ("plain", "no bias", "normalising", "normalising with bias", "hidden", "hidden without bias")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(d: int, *, angle: float = 1.5, seed: int = 0) -> torch.Tensor:
    A = random(d, d, seed=seed)
    return torch.matrix_exp(angle * (A - A.T) / math.sqrt(2 * d))


def pair_of(merged: torch.Tensor, expert: torch.Tensor) -> FeaturePair:
    return FeaturePair(Features(merged, "toy", "train"), Features(expert, "toy", "train"))


def linear_head(weight: torch.Tensor, bias: torch.Tensor | None = None, *, normalise: bool = False) -> Head:
    return Head(Linear(weight, bias), tuple(f"class {number}" for number in range(len(weight))), normalise=normalise)


def head_of(kind: str, *, d: int = 6, classes: int = 3) -> Head:
    """A head of one of the HEADS."""
    weight, bias = random(classes, d, seed=1), random(classes, seed=2)
    if kind.startswith("hidden"):
        output = Linear(random(classes, 5, seed=3), bias)
        hidden = Linear(random(5, d, seed=4), random(5, seed=5))
        if kind == "hidden without bias":
            output, hidden = Linear(output.weight), Linear(hidden.weight)
        return Head(output, tuple("abcdefgh"[:classes]), hidden, "tanh")
    normalise = kind.startswith("normalising")
    weight = weight * (8 if normalise else 1)
    return linear_head(weight, None if kind in ("no bias", "normalising") else bias, normalise=normalise)


def by_autograd(
    parameters: Sequence[torch.Tensor], loss: Callable[[], torch.Tensor], *, steps: int, lr: float
) -> list[torch.Tensor]:
    """What torch's own Adam makes of copies of the parameters when it minimises a loss written as printed."""
    optimiser = torch.optim.Adam(parameters, lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return [parameter.detach() for parameter in parameters]


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Mean over inputs of KL(softmax(teacher) || softmax(student)), both logits [n, C], as torch has it."""
    target, log_p = log_softmax(teacher.double(), 1), log_softmax(student.double(), 1)
    return float(kl_div(log_p, target, reduction="batchmean", log_target=True))
