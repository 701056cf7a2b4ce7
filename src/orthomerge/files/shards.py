"""Stream safetensors shards to disk: in order, hashed while written, synced, read back and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError, OutputError
from orthomerge.files.checkpoint import Spec
from orthomerge.files.hashing import Hasher
from orthomerge.files.paths import RawFile
from orthomerge.files.publish import write_json
from orthomerge.files.safetensors import encode_header, read_safetensors

if TYPE_CHECKING:
    import torch


_STEM = "model"
METADATA = {"format": "pt"}  # what transformers asks of a file


@dataclass(frozen=True)
class Written:
    """A file on disk, verified."""

    name: str
    size: int
    digest: str
    tensors: tuple[str, ...] = ()


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
    stem: str = _STEM,
) -> list[Written]:
    """Write STEM.safetensors, or several shards, from blocks that arrive in the order of `specs`.

    Shards of a stock model, whose stem is the default, get their index; others are found by whoever names them.
    """
    shards = plan_shards(specs, most)
    # A tensor without elements has no bytes, and whether a block comes for it does not matter.
    stream = ((name, view) for name, block in blocks if len(view := _bytes(block)))
    written = []
    for number, shard in enumerate(shards, 1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        written.append(_write_shard(folder / name, shard, stream, progress))
    if (key := next(stream, (None,))[0]) is not None:
        raise AssertionError(f"a block of {key!r} came after the last tensor")
    if len(written) > 1 and stem == _STEM:
        places = {name: shard.name for shard in written for name in shard.tensors}
        write_index(folder / f"{stem}.safetensors.index.json", places, sum(spec.nbytes for spec in specs.values()))
    return written


def write_index(path: Path, places: Mapping[str, str], total: int) -> None:
    """Tensor name -> file; `total`: bytes of all tensors."""
    write_json(path, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _write_shard(
    path: Path, specs: dict[str, Spec], stream: Iterator[tuple[str, memoryview]], progress: Callable[[int], None]
) -> Written:
    hasher = Hasher()
    with path.open("xb", buffering=0) as file:

        def write(view: memoryview) -> None:
            hasher.update(view)
            while view:
                view = view[file.write(view) :]

        header = encode_header(specs, METADATA)
        write(memoryview(header))
        for name, spec in specs.items():
            left = spec.nbytes
            while left:
                key, view = next(stream, (None, memoryview(b"")))
                if key != name or len(view) > left:
                    raise AssertionError(f"a block of {key!r} came where {left} bytes of {name!r} were due")
                write(view)
                left -= len(view)
                progress(len(view))
        os.fsync(file.fileno())
    size = len(header) + sum(spec.nbytes for spec in specs.values())
    _verify(path, specs, size, hasher.digest())
    return Written(path.name, size, hasher.digest(), tuple(specs))


def _verify(path: Path, specs: dict[str, Spec], size: int, digest: str) -> None:
    """Read a shard back: what lies on disk must be what was meant."""
    fault = OutputError(f"{path} does not read back as it was written; the disk or the memory is faulty")
    try:
        same = {name: entry.spec for name, entry in read_safetensors(path).items()} == specs
        file = RawFile(path)
        same = same and file.size == size and file.digest() == digest
    except CheckpointError as error:
        raise fault from error
    if not same:
        raise fault


def _bytes(block: torch.Tensor) -> memoryview:
    import torch

    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data
