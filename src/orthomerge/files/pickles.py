"""Read files of `torch.save` (.bin, .pt, .pth) without torch and without executing anything in them.

Both containers are read: the zip archive of torch 1.6 and later (`data.pkl` and one member per storage) and the older
stream (pickles, then the storages one after another). A tensor becomes a run of bytes in the file.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Final

from orthomerge.core.errors import CheckpointError, some
from orthomerge.files.checkpoint import DTYPES, Checkpoint, Entry, Spec
from orthomerge.files.raw_file import RawFile
from orthomerge.files.safetensors import are_counts, check_name
from orthomerge.files.state_dicts import find_weights
from orthomerge.files.unpickler import MAX_BYTES, Machine, Stream

if TYPE_CHECKING:
    from pathlib import Path

    from orthomerge.files.stand_ins import Tensor

Locate = Callable[[str], "tuple[int, int] | None"]  # key of a storage -> its offset and length in the file

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_MAX_DIRECTORY: Final = 16 << 20  # of a zip archive; about 150,000 members
_MAX_REPEATED: Final = 64 << 20  # bytes of a tensor that repeats its storage (stride 0)
_PAGES = (b"<!doctype", b"<html", b"<?xml")
_AGAIN = "load it with torch on a common machine and save it again"
_LOCAL = struct.Struct("<4s2xHH16xHH")  # signature, flags, method, length of name, length of extra


def read_pickle(path: Path) -> Checkpoint:
    """Open a file of `torch.save`, with its tensors, unread, in the order of the state dict."""
    file = RawFile(path)
    try:
        head = _head(file)
        root, locate = _read_zip(file) if head.startswith(b"PK") else _read_stream(file, head)
        return _collect(file, find_weights(path, root), locate)
    except CheckpointError:
        raise
    except Exception as error:  # the bytes are untrusted: any error of the parsers means damage
        has_reason = isinstance(error, UnpicklingError | zipfile.BadZipFile)
        why = ascii(str(error))[1:-1][:200] if has_reason else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged, or was not written by torch.save ({why}); fetch it again, or save it as safetensors"
        ) from error


def _head(file: RawFile) -> bytes:
    head = file.bytes(0, min(file.size, 512))
    refused = (
        (not head, "is empty: fetch it again"),
        (head.startswith(b"version https://git-lfs"), "is a Git LFS pointer, not the weights: run `git lfs pull`"),
        (
            head.lstrip().lower().startswith(_PAGES),
            "is a web page, not the weights: the download failed or needs a login; fetch it again",
        ),
        (
            head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.size,
            "is a safetensors file: give it the ending .safetensors",
        ),
    )
    for applies, problem in refused:
        if applies:
            raise CheckpointError(f"{file.path} {problem}")
    return head


def _read_zip(file: RawFile) -> tuple[object, Locate]:
    members, end = _members(file)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{file.path} is a zip archive with {len(pickles)} files 'data.pkl' (torch.save writes one); "
            "if it holds packed checkpoints, unpack it first"
        )
    top = pickles[0].removesuffix("data.pkl")
    if f"{top}constants.pkl" in members:
        raise CheckpointError(
            f"{file.path} is a TorchScript archive; save torch.jit.load(...).state_dict() with torch.save and open that"
        )

    def locate(name: str) -> tuple[int, int] | None:
        return _member_data(file, members[name], end) if name in members else None

    if (order := locate(f"{top}byteorder")) is not None:
        word = file.bytes(order[0], min(order[1], 16))
        if word != b"little":
            raise CheckpointError(f"{file.path} must have byte order b'little', got {word!r}; {_AGAIN}")
    begin, length = _member_data(file, members[pickles[0]], end)
    if length > MAX_BYTES:
        raise CheckpointError(
            f"data.pkl of {file.path} must have at most {MAX_BYTES} bytes, got {length}; "
            "save the state dict alone, without the training state"
        )
    return Machine(file.path, io.BytesIO(file.bytes(begin, length))).load(), lambda key: locate(f"{top}data/{key}")


def _members(file: RawFile) -> tuple[dict[str, zipfile.ZipInfo], int]:
    with Stream(file, _MAX_DIRECTORY) as stream, zipfile.ZipFile(stream) as archive:
        infos, end = archive.infolist(), archive.start_dir
    members = {info.filename: info for info in infos}
    if packed := [i.filename for i in infos if i.compress_type or i.compress_size != i.file_size or i.flag_bits & 1]:
        raise CheckpointError(
            f"{file.path} has members that are packed or encrypted ({some(packed)}), which torch.save does not write; "
            "do not trust it, or save it again with torch.save"
        )
    if len(members) != len(infos):
        raise CheckpointError(f"{file.path} has two members of the same name; do not trust it, or fetch it again")
    return members, end


def _member_data(file: RawFile, info: zipfile.ZipInfo, end: int) -> tuple[int, int]:
    """Return offset and length of a member's data from its local header; the directory begins at `end`."""
    signature, flags, method, name, extra = _LOCAL.unpack(file.bytes(info.header_offset, _LOCAL.size))
    begin = info.header_offset + _LOCAL.size + name + extra
    written = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    valid = signature == b"PK\x03\x04" and method == 0 and not flags & 1 and begin + info.file_size <= end
    if not valid or file.bytes(info.header_offset + _LOCAL.size, name) != written:
        raise zipfile.BadZipFile(f"member {info.filename} is not where the directory says")
    return begin, info.file_size


def _read_stream(file: RawFile, head: bytes) -> tuple[object, Locate]:
    """Return the content of a pickle in the older stream, and a function that locates the storages after it."""
    with Stream(file, MAX_BYTES) as stream:
        machine = Machine(file.path, stream)
        try:
            magic = machine.load()
        except CheckpointError:
            raise
        except Exception as error:
            if head.startswith(b"\x80"):
                raise
            raise CheckpointError(
                f"{file.path} is not a file of torch.save (it begins with {head[:8]!r}); fetch the weights again"
            ) from error
        if magic != _MAGIC:
            raise CheckpointError(f"{file.path} is a plain pickle, not a file of torch.save; save it again with torch")
        if (protocol := machine.load()) != _PROTOCOL:
            raise CheckpointError(f"{file.path} must have protocol {_PROTOCOL}, got {protocol!r:.20}; fetch it again")
        machine_info = machine.load()
        if not isinstance(machine_info, dict) or machine_info.get("little_endian") is not True:
            raise CheckpointError(f"{file.path} was not written on a little-endian machine; {_AGAIN}")
        root, keys = machine.load(), machine.load()
        offset = stream.tell()
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in machine.storages for key in keys):
        raise UnpicklingError("the list of storages does not fit the tensors")
    places: dict[str, tuple[int, int]] = {}
    for key in keys:  # storages follow each other, each after its count of elements
        length = int.from_bytes(file.bytes(offset, 8), "little", signed=True) * machine.storages[key].width
        if not 0 <= length <= file.size - offset - 8:
            raise CheckpointError(
                f"{file.path} was cut short: storage {key!r} at byte {offset} should hold {length} bytes, but the file "
                f"ends at {file.size}; fetch it again"
            )
        places[key] = (offset + 8, length)
        offset += 8 + length
    return root, places.get


def _collect(file: RawFile, tensors: dict[str, Tensor], locate: Locate) -> Checkpoint:
    """Return tensors as entries; tensors with the same bytes and shape become aliases of the first of them."""
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        check_name(name, file.path)
        entry = _entry(file, name, tensor, locate)
        key = (tensor.storage and tensor.storage.key, entry.offset, entry.spec, entry.strides)
        if first.setdefault(key, name) == name:
            entries[name] = entry
        else:
            aliases[name] = first[key]
    return Checkpoint(file.path, entries, aliases=aliases)


def _entry(file: RawFile, name: str, tensor: Tensor, locate: Locate) -> Entry:
    where, again = f"{file.path}: tensor {name!r}", "the file is damaged: fetch it again"
    if tensor.refused or tensor.storage is None:
        raise CheckpointError(
            f"{where} is stored as {tensor.refused}, but only plain dense tensors of real numbers are read; "
            "convert it in torch (dequantize, to_dense, real) and save it again"
        )
    offset, shape, strides, storage = tensor.offset, tensor.shape, tensor.strides, tensor.storage
    if not are_counts(shape) or not are_counts(strides) or not are_counts([offset]) or len(shape) != len(strides):
        raise CheckpointError(f"{where} must have whole numbers from 0 on as shape, strides and offset; {again}")
    span = locate(storage.key)
    if span is None:
        raise CheckpointError(f"{where} lies in storage {storage.key!r}, which the file does not have; {again}")
    if not 0 <= storage.nbytes <= span[1]:
        what = f"should have {storage.nbytes} bytes but has {span[1]}"
        raise CheckpointError(f"{where} lies in storage {storage.key!r}, which {what}; {again}")
    spec, width, begin = Spec(tuple(shape), tensor.dtype), DTYPES[tensor.dtype][0], span[0]
    if spec.numel == 0:
        return Entry(file, begin, spec)
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if extent * width > storage.nbytes:
        what = f"reaches to byte {extent * width} of storage {storage.key!r}, which has {storage.nbytes}"
        raise CheckpointError(f"{where} {what}; {again}")
    if spec.nbytes > max(storage.nbytes, _MAX_REPEATED):
        raise CheckpointError(
            f"{where} repeats {storage.nbytes} bytes to make {spec.nbytes}; save a contiguous copy of it instead"
        )
    return Entry(file, begin + offset * width, spec, _strides(spec.shape, tuple(strides)))


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides with those of axes of length 1 normalised, or None if the tensor is contiguous."""
    dense = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    same = tuple(d if n == 1 else s for n, s, d in zip(shape, strides, dense, strict=True))
    return None if same == dense else same
