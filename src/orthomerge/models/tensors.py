"""Named tensors that are streamed in order: from files, from a merge, or from memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

from orthomerge.core.errors import CheckpointError
from orthomerge.files.checkpoint import DTYPES, Checkpoint, Entry, Spec, torch_dtype
from orthomerge.files.lora import Adapter
from orthomerge.files.raw_file import digest_text
from orthomerge.files.safetensors import METADATA, encode_header

if TYPE_CHECKING:
    import torch


_BLOCK = 1 << 20  # elements per block
_SHORT = {f"torch.{name}": short for short, (_, name) in DTYPES.items()}


class Tensors(Protocol):
    """Named tensors in a fixed order, in the dtypes in which they are written."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape and dtype by canonical name, in writing order."""

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in order, as one or more flat blocks of consecutive elements."""


def spec_of(tensor: torch.Tensor, what: str) -> Spec:
    """Return shape and dtype of a tensor; a dtype that checkpoints cannot hold is an error. `what`: for messages."""
    if str(tensor.dtype) not in _SHORT:
        raise CheckpointError(f"{what} is {tensor.dtype}, which checkpoints cannot hold; convert it to float first")
    return Spec(tuple(tensor.shape), _SHORT[str(tensor.dtype)])


def in_writing_order(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Sort by element size, largest first for alignment, then by name for independence of the inputs' shards."""
    return dict(sorted(specs.items(), key=lambda item: (-DTYPES[item[1].dtype][0], item[0])))


@dataclass(frozen=True, eq=False)
class FileTensors:
    """Tensors in files. `places`: canonical name -> checkpoint and name in it."""

    places: Mapping[str, tuple[Checkpoint, str]]

    @property
    def specs(self) -> Mapping[str, Spec]:
        return in_writing_order({key: self.entry(key).spec for key in self.places})

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, spec in self.specs.items():
            entry = self.entry(key)
            step = _BLOCK if entry.strides is None else max(spec.numel, 1)  # a strided tensor is read whole
            for start in range(0, spec.numel, step):
                yield key, entry.read(start, min(start + step, spec.numel))

    def entry(self, key: str) -> Entry:
        checkpoint, name = self.places[key]
        return checkpoint.entry(name)

    def keys(self) -> tuple[str, ...]:
        return tuple(self.places)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.entry(key).spec.shape

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self.entry(key).read(start, stop).float()

    def origin(self, key: str) -> str:
        return str(self.entry(key).file.path)


@dataclass(frozen=True, eq=False)
class AdaptedTensors:
    """A base with an adapter added to it, in the base's dtypes."""

    base: FileTensors
    adapter: Adapter

    @property
    def specs(self) -> Mapping[str, Spec]:
        return self.base.specs

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, spec in self.specs.items():
            weights = self.base.entry(key).read(0, spec.numel)
            if self.adapter.shape(key) is not None:
                wide = weights.float()
                weights = wide.add_(self.adapter.delta(key, 0, spec.numel, base=wide)).to(torch_dtype(spec.dtype))
            yield key, weights


@dataclass(frozen=True, eq=False)
class MemoryTensors:
    tensors: Mapping[str, torch.Tensor]

    @property
    def specs(self) -> Mapping[str, Spec]:
        return in_writing_order({key: spec_of(tensor, repr(key)) for key, tensor in self.tensors.items()})

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key in self.specs:
            yield key, self.tensors[key].detach().cpu().contiguous().reshape(-1)


class HashedTensors:
    """Tensors that are hashed while they stream; the hash is that of a safetensors file of them."""

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self.specs = tensors.specs
        self._tensors = tensors
        self._hasher = blake3(encode_header({prefix + key: spec for key, spec in self.specs.items()}, METADATA))

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for key, block in self._tensors.blocks():
            view = block.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            if len(view):
                self._hasher.update(view)
            yield key, block

    def digest(self) -> str:
        return digest_text(self._hasher)


def content_digest(tensors: Tensors, prefix: str) -> str:
    """Hash tensors as the safetensors file that they would be written to. `prefix`: of their names in it."""
    hashed = HashedTensors(tensors, prefix)
    for _ in hashed.blocks():
        pass
    return hashed.digest()
