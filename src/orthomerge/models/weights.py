"""The encoder inside a checkpoint, seen under its canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orthomerge.files.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class EncoderWeights:
    """Floating-point encoder tensors of a checkpoint; `names` gives each one's name in the file."""

    checkpoint: Checkpoint
    names: Mapping[str, str]

    def keys(self) -> tuple[str, ...]:
        return tuple(self.names)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.checkpoint.spec(self.names[key]).shape

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self.checkpoint.read(self.names[key], start, stop).float()

    def origin(self, key: str) -> str:
        return str(self.checkpoint.origin(self.names[key]))
