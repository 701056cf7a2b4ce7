"""Tensors in memory, read like a file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError
from orthomerge.files.hashing import new_hash, preferred

if TYPE_CHECKING:
    import torch


class MemoryFile:
    """Several tensors, one after the other; `path` is a name for messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._tensors: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []

    def add(self, tensor: torch.Tensor) -> int:
        """The offset of a tensor's first byte."""
        start = self.size
        self._tensors[start] = tensor
        self._versions.append(tensor._version)  # noqa: SLF001 - torch counts changes there and nowhere else
        self.size += tensor.numel() * tensor.element_size()
        return start

    def read(self, offset: int, length: int) -> torch.Tensor:
        """A run of bytes within one tensor, as a fresh tensor of uint8."""
        import torch

        start = max((start for start in self._tensors if start <= offset), default=0)
        if not length:
            return torch.empty(0, dtype=torch.uint8)
        data = self._tensors[start].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return data[offset - start : offset - start + length].clone()

    def bytes(self, offset: int, length: int) -> bytes:
        return bytes(self.read(offset, length).tolist())

    def digest(self) -> str:
        """Hash of all tensors in order."""
        algorithm = preferred()
        running = new_hash(algorithm)
        for start, tensor in self._tensors.items():
            running.update(self.read(start, tensor.numel() * tensor.element_size()).numpy().data)
        return f"{algorithm}:{running.hexdigest()}"

    def check_unchanged(self) -> None:
        """Refuse a model that was trained or edited since it was opened."""
        versions = [tensor._version for tensor in self._tensors.values()]  # noqa: SLF001
        if versions != self._versions:
            raise CheckpointError(f"{self.path} changed since it was opened; open it again")
