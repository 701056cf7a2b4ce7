"""A checkpoint as a lazy, read-only mapping from names to tensors, each of which is a run of bytes in a file.

Shapes and dtypes are available without importing torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orthomerge.core.errors import CheckpointError, nearest

if TYPE_CHECKING:
    import torch

    from orthomerge.files.raw_file import MemoryTensor, RawFile


# Name in a safetensors header -> (bytes per element, name in torch).
DTYPES: Mapping[str, tuple[int, str]] = {
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"),
    "I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"),
    "U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8"),
    "BOOL": (1, "bool"), "C64": (8, "complex64"),
}  # fmt: skip


def is_float(dtype: str) -> bool:
    """Return whether a dtype is floating point (weights); integers and booleans are buffers."""
    return dtype.startswith(("F", "BF"))


def torch_dtype(dtype: str) -> torch.dtype:
    import torch

    return cast("torch.dtype", getattr(torch, DTYPES[dtype][1]))


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype][0]

    def cast(self, dtype: str | None) -> Spec:
        """Return the spec with another dtype; buffers keep theirs, and None changes nothing."""
        return Spec(self.shape, dtype) if dtype and is_float(self.dtype) else self


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of a tensor: a run of bytes in a file, with `strides` in elements if it is not contiguous."""

    file: RawFile | MemoryTensor
    offset: int
    spec: Spec
    strides: tuple[int, ...] | None = None

    def rows(self, start: int, stop: int) -> Entry:
        width = DTYPES[self.spec.dtype][0]
        step = self.strides[0] if self.strides is not None else prod(self.spec.shape[1:])
        spec = Spec((stop - start, *self.spec.shape[1:]), self.spec.dtype)
        return Entry(self.file, self.offset + start * step * width, spec, self.strides)

    def transposed(self) -> Entry:
        rows, columns = self.spec.shape
        strides = self.strides or (columns, 1)
        return Entry(self.file, self.offset, Spec((columns, rows), self.spec.dtype), strides[::-1])

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Read elements [start, stop) of the flattened tensor, in the dtype of the file."""
        import torch

        width, dtype = DTYPES[self.spec.dtype][0], torch_dtype(self.spec.dtype)
        if self.strides is None:
            raw = self.file.read(self.offset + start * width, (stop - start) * width)
            return raw.view(dtype)
        extent = 1 + sum((n - 1) * s for n, s in zip(self.spec.shape, self.strides, strict=True))
        raw = self.file.read(self.offset, extent * width if self.spec.numel else 0)
        return torch.as_strided(raw.view(dtype), self.spec.shape, self.strides).reshape(-1)[start:stop].clone()


@dataclass(frozen=True)
class Checkpoint(Mapping[str, "torch.Tensor"]):
    """Lazy tensors by name; `aliases` are further names of the same bytes (tied weights), not iterated over."""

    path: Path
    entries: Mapping[str, Entry]
    config: Mapping[str, Any] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    reference: str = ""
    in_memory: bool = False  # a live model, whose path is used in messages only

    def entry(self, key: str) -> Entry:
        entry = self.entries.get(self.aliases.get(key, key))
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {key!r}; {nearest(key, self.entries)}")
        return entry

    def spec(self, key: str) -> Spec:
        return self.entry(key).spec

    @property
    def specs(self) -> dict[str, Spec]:
        """Shapes and dtypes by name, aliases included."""
        return {key: self.spec(key) for key in (*self.entries, *self.aliases)}

    def origin(self, key: str) -> Path:
        return self.entry(key).file.path

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Read elements [start, stop) of a flattened tensor, in the dtype of the file."""
        return self.entry(key).read(start, stop)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self:
            raise KeyError(key)
        entry = self.entry(key)
        return entry.read(0, entry.spec.numel).reshape(entry.spec.shape)

    def __contains__(self, key: object) -> bool:
        return key in self.entries or key in self.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def files(self) -> tuple[RawFile | MemoryTensor, ...]:
        return tuple(sorted({entry.file for entry in self.entries.values()}, key=lambda file: file.path))

    @property
    def nbytes(self) -> int:
        return sum(entry.spec.nbytes for entry in self.entries.values())
