"""Named tensors that can be streamed in order: what files hold, what a merge computes, or what is in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from orthomerge.core.errors import CheckpointError
from orthomerge.files.checkpoint import DTYPES, Checkpoint, Entry, Spec, torch_dtype
from orthomerge.files.lora import Adapter
from orthomerge.files.raw_file import Hasher
from orthomerge.files.safetensors import METADATA, encode_header

if TYPE_CHECKING:
    import torch


_RUN = 1 << 20  # elements per block
_SHORT = {f"torch.{name}": short for short, (_, name) in DTYPES.items()}


class Tensors(Protocol):
    """Named tensors in a fixed order, in the dtype in which they are written."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Canonical name -> shape and dtype, in writing order."""
        ...

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in order, as one or more flat runs of elements."""
        ...


def spec_of(tensor: torch.Tensor, what: str) -> Spec:
    """Shape and dtype of a tensor in memory; a dtype that checkpoints do not have is an error about `what`."""
    if str(tensor.dtype) not in _SHORT:
        raise CheckpointError(f"{what} is {tensor.dtype}; convert it to float first")
    return Spec(tuple(tensor.shape), _SHORT[str(tensor.dtype)])


def in_writing_order(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Wide elements first, so that all are aligned; then by name, so that the shards of the inputs do not matter."""
    return dict(sorted(specs.items(), key=lambda item: (-DTYPES[item[1].dtype][0], item[0])))


@dataclass(frozen=True, eq=False)
class FileTensors:
    """Tensors in files. `places`: canonical name -> the checkpoint and the name there."""

    places: Mapping[str, tuple[Checkpoint, str]]

    @property
    def specs(self) -> Mapping[str, Spec]:
        return in_writing_order({key: self.entry(key).spec for key in self.places})

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, spec in self.specs.items():
            entry = self.entry(key)
            step = _RUN if entry.strides is None else max(spec.numel, 1)  # a strided tensor is read whole each time
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
        """Elements [start, stop) of the flattened tensor, in float32."""
        return self.entry(key).read(start, stop).float()

    def origin(self, key: str) -> str:
        """The file that a tensor lies in, for messages."""
        return str(self.entry(key).file.path)


@dataclass(frozen=True, eq=False)
class AdaptedTensors:
    """A base with an adapter on top, in the base's dtypes."""

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
    """Tensors in memory, by canonical name."""

    tensors: Mapping[str, torch.Tensor]

    @property
    def specs(self) -> Mapping[str, Spec]:
        return in_writing_order({key: spec_of(tensor, repr(key)) for key, tensor in self.tensors.items()})

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key in self.specs:
            yield key, self.tensors[key].detach().cpu().contiguous().reshape(-1)


class HashedTensors:
    """Tensors that are hashed as they stream: the hash of the safetensors file that they could be written to."""

    def __init__(self, tensors: Tensors, prefix: str, *, algorithm: str | None = None) -> None:
        self.specs = tensors.specs
        self._tensors, self._hasher = tensors, Hasher(algorithm)
        self._hasher.update(encode_header({prefix + key: spec for key, spec in self.specs.items()}, METADATA))

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for key, block in self._tensors.blocks():
            view = block.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            if len(view):
                self._hasher.update(view)
            yield key, block

    def digest(self) -> str:
        return self._hasher.digest()


def content_digest(tensors: Tensors, prefix: str) -> str:
    """The hash of the file that tensors would be written to, under names with a prefix."""
    hashed = HashedTensors(tensors, prefix)
    for _ in hashed.blocks():
        pass
    return hashed.digest()
