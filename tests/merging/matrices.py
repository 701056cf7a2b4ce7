"""Random updates of one matrix, and a method applied to them."""

import torch

from orthomerge.merging.kinds import Site, TensorMethod

KEY = "layer.0.weight"


def normal(*shape: int, seed: int = 0, scale: float = 1e-2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def merge(method: TensorMethod, deltas: torch.Tensor, *, key: str = KEY) -> torch.Tensor:
    """The merged delta of one tensor [T, *shape] over a base of ones."""
    shape = tuple(deltas.shape[1:])
    return method.merge(torch.ones(shape), deltas, site=Site(key, shape, 0, tuple(map(str, range(len(deltas))))))
