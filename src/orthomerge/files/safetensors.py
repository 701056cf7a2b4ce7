"""Read safetensors files, with strict checks of the header, and write them as shards.

The reference library accepts duplicate keys (the last wins) and odd names; a merge must not, so the header is parsed
here. Shards are written in order, hashed meanwhile, synced, read back and compared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from orthomerge.core.errors import CheckpointError, OutputError
from orthomerge.files.checkpoint import DTYPES, Entry, Spec
from orthomerge.files.documents import parse_json, write_json
from orthomerge.files.raw_file import RawFile, digest_text

if TYPE_CHECKING:
    import torch

_SURROGATE = re.compile("[\ud800-\udfff]")
_LENGTH = 8
_MAX_HEADER = 100_000_000  # the reference implementation's limit
_MAX_NAME = 1_000
_MAX_AXES = 64
_DAMAGED = "the file is damaged: fetch it again"
_STEM = "model"
METADATA = {"format": "pt"}  # required by transformers


def read_safetensors(path: Path) -> dict[str, Entry]:
    file = RawFile(path)
    header, start = _header(file)
    header.pop("__metadata__", None)
    spans: list[tuple[int, int, str, Spec]] = []
    for name, fields in header.items():
        check_name(name, path)
        spec, begin, end = _tensor(fields, name, path)
        spans.append((begin, end, name, spec))
    spans.sort(key=lambda span: span[:3])
    _check_cover(spans, file.size - start, path)
    return {name: Entry(file, start + begin, spec) for begin, _, name, spec in spans}


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a file: free-form strings in its header."""
    return dict(_header(RawFile(path))[0].get("__metadata__", {}))


def encode_header(specs: dict[str, Spec], metadata: dict[str, str]) -> bytes:
    """Encode length and header of a file with `specs` in this order; the data is aligned to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, spec in specs.items():
        end = position + spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text


def check_name(name: str, path: Path) -> None:
    """Refuse names of tensors that no framework writes and that could be misused as paths."""
    unsafe = any(part in name for part in ("..", "/", "\\")) or not name.isprintable()
    if not name or len(name) > _MAX_NAME or unsafe or name == "__metadata__":
        raise CheckpointError(
            f"{path} holds a tensor with the name {name[:80]!r}, which no framework writes; do not trust this file"
        )


def are_counts(values: Any) -> bool:
    """Return whether values can be a shape or offsets: a short list of non-negative integers."""
    if not isinstance(values, list | tuple) or len(values) > _MAX_AXES:
        return False
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


def _header(file: RawFile) -> tuple[dict[str, Any], int]:
    path = file.path
    if file.size < _LENGTH:
        raise CheckpointError(f"{path} has {file.size} bytes, too few for a safetensors file: fetch it again")
    first = file.bytes(0, _LENGTH)
    length = int.from_bytes(first, "little")
    if length > min(_MAX_HEADER, file.size - _LENGTH):
        what = f"is not a safetensors file, or was cut short: its header would be {length} bytes long; fetch it again"
        if first == b"version ":
            what = "is a Git LFS pointer, not the weights: run `git lfs pull`"
        raise CheckpointError(f"{path} {what}")
    header = parse_json(file.bytes(_LENGTH, length), f"the header of {path}")
    metadata = header.get("__metadata__", {})
    # The reference implementation refuses lone surrogates, which Python's JSON accepts.
    strings = (*metadata, *metadata.values()) if isinstance(metadata, dict) else (None,)
    if not all(isinstance(string, str) and not _SURROGATE.search(string) for string in strings):
        raise CheckpointError(f"{path}: '__metadata__' must hold strings only; {_DAMAGED}")
    return header, _LENGTH + length


def _tensor(fields: Any, name: str, path: Path) -> tuple[Spec, int, int]:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets; {_DAMAGED}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where} has dtype {dtype!r:.80}, which is not supported (known: {', '.join(DTYPES)}); "
            "quantised weights must be converted to float first"
        )
    valid = are_counts(shape) and prod(max(count, 1) for count in shape) < 2**60
    if not valid or not are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has invalid shape {shape!r:.80} or offsets {offsets!r:.80}; {_DAMAGED}")
    spec = Spec(tuple(shape), dtype)
    begin, end = offsets
    if end - begin != spec.nbytes:
        raise CheckpointError(
            f"{where} is {spec.shape} {dtype}, {spec.nbytes} bytes, but the header gives it {end - begin}; {_DAMAGED}"
        )
    return spec, begin, end


def _check_cover(spans: list[tuple[int, int, str, Spec]], size: int, path: Path) -> None:
    position = 0
    for begin, end, name, _ in spans:
        if begin != position:
            what = "overlaps another tensor" if begin < position else f"leaves {begin - position} bytes unaccounted for"
            raise CheckpointError(f"{path}: tensor {name!r} {what}; {_DAMAGED}")
        position = end
    if position > size:
        raise CheckpointError(
            f"{path} was cut short: {position - size} bytes of its last tensors are missing; fetch it again"
        )
    if position < size:
        raise CheckpointError(f"{path} has {size - position} bytes after its last tensor; {_DAMAGED}")


@dataclass(frozen=True)
class Written:
    """A file that was written and verified."""

    name: str
    size: int
    digest: str
    tensors: tuple[str, ...] = ()


def plan_shards(specs: dict[str, Spec], max_bytes: int) -> list[dict[str, Spec]]:
    """Distribute tensors over shards of at most `max_bytes` bytes, in order; a larger tensor gets its own shard."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > max_bytes:
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
    max_bytes: int,
    progress: Callable[[int], None] = lambda count: None,
    stem: str = _STEM,
) -> list[Written]:
    """Write STEM.safetensors or shards with an index; `blocks` are parts of the tensors, in the order of `specs`."""
    shards = plan_shards(specs, max_bytes)
    # Blocks without elements are skipped: for an empty tensor, there may or may not be one.
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
    """Write the index of shards: `places` are file names by tensor, `total` is the size of all tensors in bytes."""
    write_json(path, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _write_shard(
    path: Path, specs: dict[str, Spec], stream: Iterator[tuple[str, memoryview]], progress: Callable[[int], None]
) -> Written:
    header = encode_header(specs, METADATA)
    hasher = blake3(header)
    with path.open("xb") as file:
        file.write(header)
        for name, spec in specs.items():
            remaining = spec.nbytes
            while remaining:
                key, view = next(stream, (None, memoryview(b"")))
                if key != name or len(view) > remaining:
                    raise AssertionError(f"a block of {key!r} came where {remaining} bytes of {name!r} were due")
                file.write(view)
                hasher.update(view)
                remaining -= len(view)
                progress(len(view))
        file.flush()
        os.fsync(file.fileno())
    size = len(header) + sum(spec.nbytes for spec in specs.values())
    written = Written(path.name, size, digest_text(hasher), tuple(specs))
    _verify(path, specs, written)
    return written


def _verify(path: Path, specs: dict[str, Spec], written: Written) -> None:
    try:
        file, entries = RawFile(path), read_safetensors(path)
        same = {name: entry.spec for name, entry in entries.items()} == specs
        same = same and file.size == written.size and file.digest() == written.digest
    except CheckpointError:
        same = False
    if not same:
        raise OutputError(f"{path} does not read back as it was written; the disk or the memory is faulty")


def _bytes(block: torch.Tensor) -> memoryview:
    import torch

    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data
