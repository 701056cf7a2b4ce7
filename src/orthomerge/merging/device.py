"""Blocks merged on an accelerator: for the methods that decompose matrices.

Every thread that merges has a stream of its own on the device, so that one block travels while another is merged; both
ways through pinned memory, which the device fetches from by itself. What comes back is added to the base on the host,
as always. The last digits are the device's, so the bytes are not those of a merge on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from orthomerge.merging.kinds import Block, Scope, Site, TensorMethod, Vectors

LARGER = 32  # times the memory for blocks under way: whole matrices, several at once


@dataclass(frozen=True, eq=False)
class OnDevice:
    """A method whose blocks are sent to a device, and what it makes of them back."""

    method: TensorMethod
    device: torch.device
    _own: threading.local = field(default_factory=threading.local, repr=False)

    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        torch.linalg.eigvalsh(torch.eye(2, device=self.device))  # torch loads the library for it; two threads must not

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        with self._stream():
            delta = self.method.merge(_sent(base, self.device), _sent(deltas, self.device), site=site)
            landed = torch.empty(delta.shape, dtype=delta.dtype, pin_memory=self.device.type == "cuda")
            return landed.copy_(delta)  # waits for this thread's stream alone

    def _stream(self) -> AbstractContextManager[object]:
        if self.device.type != "cuda":
            return nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        context: AbstractContextManager[object] = torch.cuda.stream(self._own.stream)
        return context


@dataclass(frozen=True, eq=False)
class SeenThere:
    """Task vectors whose blocks and factors lie on a device."""

    vectors: Vectors
    device: torch.device

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.vectors.tasks

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.vectors.shapes

    def blocks(self, *, keys: tuple[str, ...] | None = None, scope: Scope = "element") -> Iterator[Block]:
        for block in self.vectors.blocks(keys=keys, scope=scope):
            yield replace(block, base=_sent(block.base, self.device), deltas=_sent(block.deltas, self.device))

    def factors(self, key: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...] | None:
        found = self.vectors.factors(key)
        return found and tuple((_sent(left, self.device), _sent(right, self.device)) for left, right in found)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


if TYPE_CHECKING:
    _method: type[TensorMethod] = OnDevice
    _vectors: type[Vectors] = SeenThere
