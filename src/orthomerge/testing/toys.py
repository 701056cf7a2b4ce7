"""Small pairs of features, and heads of every kind."""

from __future__ import annotations

import math

import torch

from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head, Linear

HEADS = ("plain", "no bias", "normalising", "normalising with bias", "hidden", "hidden without bias")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(d: int, *, angle: float = 1.5, seed: int = 0) -> torch.Tensor:
    """Return a random rotation [d, d]."""
    A = random(d, d, seed=seed)
    return torch.matrix_exp(angle * (A - A.T) / math.sqrt(2 * d))


def pair_of(merged: torch.Tensor, expert: torch.Tensor) -> FeaturePair:
    """Return a pair of features of a task "toy"."""
    return FeaturePair(Features(merged, "toy", "train"), Features(expert, "toy", "train"))


def linear_head(weight: torch.Tensor, bias: torch.Tensor | None = None, *, normalise: bool = False) -> Head:
    """Return a head of one layer with the labels "class 0", "class 1", ..."""
    return Head(Linear(weight, bias), tuple(f"class {number}" for number in range(len(weight))), normalise=normalise)


def head_of(kind: str, *, d: int = 6, classes: int = 3) -> Head:
    """Return a head of one of the kinds in `HEADS`."""
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
