"""Blocks merged on an accelerator: for the methods that decompose matrices.

The result is added to the base on the host, as always. Its last digits are the device's, so the bytes are not those of
a merge on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from orthomerge.merging.kinds import Block, Scope, Site, TensorMethod, Vectors

LARGER = 32  # times the memory for blocks in progress: whole matrices, several at once


@dataclass(frozen=True, eq=False)
class MethodOnDevice:
    """A method that merges blocks of the host on a device."""

    method: TensorMethod
    device: torch.device

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        torch.linalg.eigvalsh(torch.eye(2, device=self.device))  # torch loads the library for it; two threads must not

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return self.method.merge(base.to(self.device), deltas.to(self.device), site=site).cpu()


@dataclass(frozen=True, eq=False)
class VectorsOnDevice:
    """Task vectors whose blocks and factors are on a device, for surveys."""

    vectors: Vectors
    device: torch.device

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.vectors.tasks

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.vectors.shapes

    def blocks(self, *, keys: tuple[str, ...] | None = None, scope: Scope = "element") -> Iterator[Block]:
        for block in self.vectors.blocks(keys=keys, scope=scope):
            yield replace(block, base=block.base.to(self.device), deltas=block.deltas.to(self.device))

    def factors(self, key: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...] | None:
        pairs = self.vectors.factors(key)
        return pairs and tuple((left.to(self.device), right.to(self.device)) for left, right in pairs)


if TYPE_CHECKING:
    _method: type[TensorMethod] = MethodOnDevice
    _vectors: type[Vectors] = VectorsOnDevice
