"""Streaming safetensors shards: written in order, hashed on the way, synced, read back and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.checkpoints.checkpoint import Spec
from orthomerge.checkpoints.files import RawFile
from orthomerge.checkpoints.hashing import new_hash, preferred
from orthomerge.checkpoints.publish import write_json
from orthomerge.checkpoints.safetensors import encode_header, read_safetensors
from orthomerge.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    import torch

__all__ = ["Written", "plan_shards", "write_shards"]

_METADATA = {"format": "pt"}  # what transformers asks of a file


@dataclass(frozen=True)
class Written:
    """A file on disk, verified."""

    name: str
    size: int
    digest: str


def plan_shards(specs: dict[str, Spec], most: int) -> list[dict[str, Spec]]:
    """Cut tensors into shards of at most `most` bytes, in order; a tensor that is larger gets one of its own."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > most:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.nbytes
    return shards


def write_shards(
    folder: Path,
    specs: dict[str, Spec],
    blocks: Iterable[tuple[str, torch.Tensor]],
    *,
    most: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[Written]:
    """Write `model.safetensors`, or shards with an index, from blocks that arrive in the order of `specs`."""
    shards = plan_shards(specs, most)
    stream = _views(blocks)
    written = [
        _write_shard(folder / _shard_name(number, len(shards)), shard, stream, progress)
        for number, shard in enumerate(shards, 1)
    ]
    if (key := next(stream, (None,))[0]) is not None:
        raise AssertionError(f"a block of {key!r} came after the last tensor")
    _write_index(folder, shards)
    return written


def _shard_name(number: int, count: int) -> str:
    """The file of shard `number`, from 1 on, of `count`."""
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _write_index(folder: Path, shards: list[dict[str, Spec]]) -> None:
    """Where each tensor is; a single file needs no index."""
    if len(shards) == 1:
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        places |= dict.fromkeys(shard, _shard_name(number, len(shards)))
    total = sum(spec.nbytes for shard in shards for spec in shard.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))},
    )


def _views(blocks: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, memoryview]]:
    """Blocks as bytes; a tensor without elements has none, and whether a block comes for it does not matter."""
    return ((name, view) for name, block in blocks if len(view := _bytes(block)))


def _write_shard(
    path: Path,
    specs: dict[str, Spec],
    stream: Iterator[tuple[str, memoryview]],
    progress: Callable[[int], None],
) -> Written:
    algorithm = preferred()
    running = new_hash(algorithm)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        header = encode_header(specs, _METADATA)
        _write(handle, memoryview(header), running.update)
        size = len(header)
        for name, spec in specs.items():
            left = spec.nbytes
            while left:
                key, view = next(stream, (None, memoryview(b"")))
                if key != name or len(view) > left:
                    raise AssertionError(f"a block of {key!r} came where {left} bytes of {name!r} were due")
                _write(handle, view, running.update)
                left -= len(view)
                progress(len(view))
            size += spec.nbytes
        os.fsync(handle)
    finally:
        os.close(handle)
    digest = f"{algorithm}:{running.hexdigest()}"
    _verify(path, specs, size, digest)
    return Written(path.name, size, digest)


def _verify(path: Path, specs: dict[str, Spec], size: int, digest: str) -> None:
    """Read a shard back: what lies on disk must be what was meant."""
    fault = OutputError(f"{path} does not read back as it was written; the disk or the memory is faulty")
    try:
        found = {name: entry.spec for name, entry in read_safetensors(path).items()}
        file = RawFile(path)
        sound = found == specs and file.size == size and file.digest() == digest
    except CheckpointError as error:
        raise fault from error
    if not sound:
        raise fault


def _bytes(block: torch.Tensor) -> memoryview:
    import torch

    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(handle: int, view: memoryview, hashed: Callable[[memoryview], object]) -> None:
    hashed(view)
    while view:
        view = view[os.write(handle, view) :]
