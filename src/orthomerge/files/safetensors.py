"""Read safetensors files; the header is checked strictly before any tensor is used.

The format is eight bytes of header length, a JSON header, and the tensors' bytes. The reference library accepts
duplicate keys (the last wins) and odd names; a merge must not, so the header is parsed here, strictly.
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError
from orthomerge.files.checkpoint import DTYPES, Entry, Spec
from orthomerge.files.documents import parse_json
from orthomerge.files.paths import RawFile

_SURROGATE = re.compile("[\ud800-\udfff]")
_LENGTH = 8
_MOST_HEADER = 100_000_000  # the reference implementation's limit
_MOST_NAME = 1_000
_MOST_AXES = 64


def read_safetensors(path: Path, *, algorithm: str | None = None) -> dict[str, Entry]:
    """Every tensor of a file by name, unread, in the order of their bytes. `algorithm`: of the file's hash."""
    file = RawFile(path, algorithm=algorithm)
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
    """The free-form strings of a file's header."""
    return dict(_header(RawFile(path))[0].get("__metadata__", {}))


def encode_header(specs: dict[str, Spec], metadata: dict[str, str]) -> bytes:
    """Length and header of a file that holds `specs` in this order, padded so that the data is aligned to 8 bytes."""
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
    odd = any(part in name for part in ("..", "/", "\\")) or not name.isprintable()
    if not name or len(name) > _MOST_NAME or odd or name == "__metadata__":
        shown = name if len(name) < 80 else name[:80] + "..."
        raise CheckpointError(
            f"{path} holds a tensor with the name {shown!r}, which no framework writes; do not trust this file"
        )


def are_counts(values: Any) -> bool:
    """Whether values can be a shape or offsets: a few whole numbers from 0 on."""
    if not isinstance(values, list | tuple) or len(values) > _MOST_AXES:
        return False
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


def _header(file: RawFile) -> tuple[dict[str, Any], int]:
    path = file.path
    if file.size < _LENGTH:
        raise CheckpointError(f"{path} has {file.size} bytes, too few for a safetensors file: fetch it again")
    first = file.bytes(0, _LENGTH)
    length = int.from_bytes(first, "little")
    if length > min(_MOST_HEADER, file.size - _LENGTH):
        what = f"is not a safetensors file, or was cut short: its header would be {length} bytes long; fetch it again"
        if first == b"version ":
            what = "is a Git LFS pointer, not the weights: run `git lfs pull`"
        raise CheckpointError(f"{path} {what}")
    header = parse_json(file.bytes(_LENGTH, length), f"the header of {path}")
    metadata = header.get("__metadata__", {})
    # The reference implementation refuses half a surrogate pair, which Python's JSON lets through.
    words = (*metadata, *metadata.values()) if isinstance(metadata, dict) else (None,)
    if not all(isinstance(word, str) and not _SURROGATE.search(word) for word in words):
        raise CheckpointError(f"{path}: '__metadata__' must hold strings only; the file is damaged: fetch it again")
    return header, _LENGTH + length


def _tensor(fields: Any, name: str, path: Path) -> tuple[Spec, int, int]:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets; the file is damaged: fetch it again")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where} has dtype {dtype!r:.80}, which is not supported (known: {', '.join(DTYPES)}); "
            "quantised weights must be converted to float first"
        )
    believable = are_counts(shape) and prod(max(count, 1) for count in shape) < 2**60
    if not believable or not are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has shape {shape!r:.80} at bytes {offsets!r:.80}; the file is damaged: fetch it again"
        )
    spec = Spec(tuple(shape), dtype)
    begin, end = offsets
    if end - begin != spec.nbytes:
        raise CheckpointError(
            f"{where} is {spec.shape} {dtype}, {spec.nbytes} bytes, but the header gives it {end - begin}; "
            "the file is damaged: fetch it again"
        )
    return spec, begin, end


def _check_cover(spans: list[tuple[int, int, str, Spec]], size: int, path: Path) -> None:
    """Tensors must lie back to back and fill the file, so that no byte is read twice or not at all."""
    position = 0
    for begin, end, name, _ in spans:
        if begin != position:
            what = "overlaps another tensor" if begin < position else f"leaves {begin - position} bytes unaccounted for"
            raise CheckpointError(f"{path}: tensor {name!r} {what}; the file is damaged: fetch it again")
        position = end
    if position > size:
        raise CheckpointError(
            f"{path} was cut short: {position - size} bytes of its last tensors are missing; fetch it again"
        )
    if position < size:
        raise CheckpointError(
            f"{path} has {size - position} bytes after its last tensor; the file is damaged: fetch it again"
        )
