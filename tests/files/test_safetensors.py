"""Safetensors files: the same tensors as the reference library reads and writes, and nothing that is not sound."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file

from orthomerge.core.errors import CheckpointError, OutputError
from orthomerge.files.checkpoint import DTYPES, Checkpoint, Entry, Spec, is_float, torch_dtype
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.safetensors import Written, check_name, plan_shards, read_safetensors, write_shards

NAMES = {getattr(torch, name): short for short, (_, name) in DTYPES.items()}
INDEX = "model.safetensors.index.json"


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bytes that are a sound tensor of a dtype."""
    generator = torch.Generator().manual_seed(seed)
    count = Spec(shape, dtype).nbytes
    raw = torch.randint(0, 2 if dtype == "BOOL" else 60, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(torch_dtype(dtype)).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def values(entry: Entry) -> torch.Tensor:
    return entry.read(0, entry.spec.numel).reshape(entry.spec.shape)


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, Spec]:
    return {name: Spec(tuple(tensor.shape), NAMES[tensor.dtype]) for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A file as we write it."""
    write_shards(folder, specs_of(tensors), tensors.items(), max_bytes=10**9)
    return folder / "model.safetensors"


def raw(path: Path, header: bytes, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header."""
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


SHAPES = ((3, 4), (5,), (), (0,), (2, 0, 3), (1, 1, 1, 2))
EVERYTHING = {
    f"{dtype}.{'x'.join(map(str, shape)) or 'scalar'}": tensor(dtype, shape, number)
    for number, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in SHAPES)
}


def test_what_we_write_is_read_by_the_library_and_here(tmp_path: Path) -> None:
    wide_first = dict(sorted(EVERYTHING.items(), key=lambda item: -item[1].element_size()))
    path = write(tmp_path, {"gewicht.größe": torch.ones(2), **wide_first})
    theirs = load_file(path)
    assert set(theirs) == {"gewicht.größe", *EVERYTHING}
    assert all(same(theirs[name], value) for name, value in EVERYTHING.items())
    assert list(read_safetensors(path)) == ["gewicht.größe", *wide_first]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_a_file_without_tensors_and_one_with_a_padded_header(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    assert (read_safetensors(path), load_file(path)) == ({}, {})
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode() + b"   "
    assert list(read_safetensors(raw(tmp_path / "x", header, bytes(8)))) == ["a"]


def test_runs_of_a_tensor(tmp_path: Path) -> None:
    matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    entry = read_safetensors(write(tmp_path, {"pad": torch.ones(3), "m": matrix}))["m"]
    assert torch.equal(entry.read(3, 9), matrix.reshape(-1)[3:9])
    assert torch.equal(values(entry.rows(1, 3)), matrix[1:3])
    assert torch.equal(values(entry.transposed()), matrix.T)
    assert torch.equal(entry.transposed().read(2, 7), matrix.T.reshape(-1)[2:7])
    assert torch.equal(values(entry.transposed().rows(1, 3)), matrix.T[1:3])
    assert torch.equal(values(entry.transposed().transposed()), matrix)
    assert values(entry.rows(1, 1)).shape == (0, 4)
    assert values(entry.transposed().rows(2, 2)).shape == (0, 3)


def test_a_checkpoint_is_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, {"b": torch.zeros(3, 1, dtype=torch.int64), "a": torch.ones(2)})
    checkpoint = Checkpoint(path, read_safetensors(path), aliases={"c": "a"})
    assert (list(checkpoint), len(checkpoint), "c" in checkpoint, "d" in checkpoint) == (["b", "a"], 2, True, False)
    assert torch.equal(checkpoint["c"], torch.ones(2))
    assert checkpoint["b"].shape == (3, 1)
    assert checkpoint.spec("b") == Spec((3, 1), "I64")
    assert torch.equal(checkpoint.read("a", 1, 2), torch.ones(1))
    assert (checkpoint.origin("c"), checkpoint.nbytes, [file.path for file in checkpoint.files]) == (path, 32, [path])
    with pytest.raises(KeyError, match="'d'"):
        checkpoint["d"]
    with pytest.raises(CheckpointError, match=r"model.safetensors has no tensor 'bb'; did you mean 'b'\?"):
        checkpoint.spec("bb")
    assert [dtype for dtype in DTYPES if is_float(dtype)] == ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]


def _tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


EMPTY = _tensor(shape=[0], data_offsets=[4, 4])
LONG = _tensor(shape=[2**61, 2**61])
HUGE = _tensor(shape=[2**40, 2**40, 0], data_offsets=[0, 0])
# Header (or the bytes of one), data, and what must be said.
HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "trailing bytes": ({"a": _tensor()}, bytes(11), "x has 3 bytes after its last tensor; the file is damaged"),
    "cut short": ({"a": _tensor()}, bytes(5), "x was cut short: 3 bytes of its last tensors are missing; fetch"),
    "overlap": ({"a": _tensor(), "b": _tensor(data_offsets=[4, 12])}, bytes(12), "tensor 'b' overlaps another tensor"),
    "gap": ({"a": _tensor(), "b": _tensor(data_offsets=[9, 17])}, bytes(17), "'b' leaves 1 bytes unaccounted for"),
    "empty tensor inside another": ({"a": _tensor(), "b": EMPTY}, bytes(8), "tensor 'b' overlaps another tensor"),
    "wrong length": ({"a": _tensor(shape=[3])}, bytes(8), r"tensor 'a' is \(3,\) F32, 12 bytes, but the header gives"),
    "backwards": ({"a": _tensor(data_offsets=[8, 0])}, bytes(8), "'a' is .*8 bytes, but the header gives it -8"),
    "overflow": ({"a": LONG}, bytes(8), r"'a' has invalid shape \[23058.* the file is damaged"),
    "overflow hidden by a zero": ({"a": HUGE}, b"", r"'a' has invalid shape \[1099511627776, 1099511627776, 0\] or"),
    "too many axes": ({"a": _tensor(shape=[1] * 99)}, bytes(8), "tensor 'a' has invalid shape .{80} or offsets"),
    "negative": ({"a": _tensor(shape=[-2])}, bytes(8), r"tensor 'a' has invalid shape \[-2\] or offsets \[0, 8\]"),
    "truth": ({"a": _tensor(dtype="U8", shape=[True], data_offsets=[0, 1])}, b"x", r"'a' has invalid shape \[True\]"),
    "no offsets": ({"a": _tensor(data_offsets=None)}, bytes(8), "or offsets None"),
    "unknown dtype": ({"a": _tensor(dtype="F4")}, bytes(8), r"'a' has dtype 'F4', which is not supported \(known: F64"),
    "dtype a mapping": ({"a": _tensor(dtype={})}, bytes(8), r"'a' has dtype \{\}, which is not supported"),
    "extra field": ({"a": _tensor(strides=[1])}, bytes(8), "tensor 'a' must have dtype, shape and data_offsets"),
    "no mapping": ({"a": [1]}, bytes(8), "tensor 'a' must have dtype, shape and data_offsets"),
    "metadata numbers": ({"__metadata__": {"a": 1}}, b"", "x: '__metadata__' must hold strings only"),
    "metadata a tensor": ({"__metadata__": _tensor()}, bytes(8), "x: '__metadata__' must hold strings only"),
    "duplicate key": (b'{"a":{"dtype":"F32"},"a":{"dtype":"I32"}}', b"", "of .*x has the key 'a' twice; do not trust"),
}


@pytest.mark.parametrize(("header", "data", "match"), HEADERS.values(), ids=HEADERS.keys())
def test_damaged_headers(tmp_path: Path, header: Any, data: bytes, match: str) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(CheckpointError, match=match):
        read_safetensors(raw(tmp_path / "x", text, data))


ODD_NAMES = [
    *("", "..", "../../etc/passwd", "a..b", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "a\x1b[31m", "a\u202eb"),
    *("\ud800", "a\u2028b", "x" * 1_001, "\x7f", "a\tb"),
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=[ascii(name[:20]) for name in ODD_NAMES])
def test_odd_names_of_tensors(tmp_path: Path, name: str) -> None:
    path = raw(tmp_path / "x", json.dumps({name: _tensor()}).encode(), bytes(8))
    match = r"x holds a tensor with the name '.*', which no framework writes; do not"
    with pytest.raises(CheckpointError, match=match):
        read_safetensors(path)


def test_names_that_are_fine_and_one_that_is_not() -> None:
    for name in ("a", "a.b.0.weight", "größe", "x" * 1_000, "a b", "a:b", "_x", "层.weight"):
        check_name(name, Path("x"))
    with pytest.raises(CheckpointError, match="tensor with the name '__metadata__', which no framework writes"):
        check_name("__metadata__", Path("x"))


def test_broken_beginnings(tmp_path: Path) -> None:
    header = json.dumps({"a": _tensor()}).encode()
    for data, match in (
        (b"", "x has 0 bytes, too few for a safetensors file: fetch it again"),
        (bytes(8), "the header of .*x is not valid JSON"),
        (len(header).to_bytes(8, "little") + header[:-1], "was cut short: its header would be"),
        ((1 << 40).to_bytes(8, "little") + header, f"its header would be {1 << 40} bytes long; fetch it again"),
        (b"\xff" * 8 + header, "is not a safetensors file, or was cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"Git LFS pointer.*`git lfs pull`"),
        (b"PK\x03\x04" + bytes(60), "is not a safetensors file|not valid JSON"),
    ):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(CheckpointError, match=match):
            read_safetensors(tmp_path / "x")


def test_a_header_longer_than_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(200_000_000)  # sparse: it takes no room
    started = time.process_time()
    with pytest.raises(CheckpointError, match="its header would be 100000001 bytes long"):
        read_safetensors(path)
    assert time.process_time() - started < 1


def random(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{number}.weight": torch.randn(4, 5, generator=generator) for number in range(count)}


PLANS: dict[str, tuple[tuple[int, ...], int, list[list[int]]]] = {
    "nothing": ((), 10, [[]]),
    "all in one": ((5, 5), 10, [[5, 5]]),
    "too large for any": ((11,), 10, [[11]]),
    "too large, between": ((1, 11, 1), 10, [[1], [11], [1]]),
    "full to the brim": ((10, 10), 10, [[10], [10]]),
    "no reordering": ((6, 6, 4, 4), 10, [[6], [6, 4], [4]]),
    "empty tensors": ((0, 10, 0, 1, 0), 10, [[0, 10, 0], [1, 0]]),
}


@pytest.mark.parametrize(("sizes", "most", "expected"), PLANS.values(), ids=PLANS.keys())
def test_where_shards_are_cut(sizes: tuple[int, ...], most: int, expected: list[list[int]]) -> None:
    specs = {f"t{number}": Spec((size,), "U8") for number, size in enumerate(sizes)}
    shards = plan_shards(specs, most)
    assert [[spec.nbytes for spec in shard.values()] for shard in shards] == expected
    assert [name for shard in shards for name in shard] == list(specs)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    tensors = random()
    counts: list[int] = []
    written = write_shards(tmp_path, specs_of(tensors), tensors.items(), max_bytes=10**9, progress=counts.append)
    path = tmp_path / "model.safetensors"
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    digest = f"blake3:{blake3(path.read_bytes()).hexdigest()}"
    assert written == [Written(path.name, path.stat().st_size, digest, tuple(tensors))]
    assert counts == [80] * 5
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = random()
    written = write_shards(tmp_path, specs_of(tensors), tensors.items(), max_bytes=160)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [file.name for file in written] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, INDEX]
    places = {f"layer.{number}.weight": names[number // 2] for number in range(5)}
    assert json.loads((tmp_path / INDEX).read_text()) == {"metadata": {"total_size": 400}, "weight_map": places}
    for shard in names:
        held = load_file(tmp_path / shard)
        assert set(held) == {name for name, place in places.items() if place == shard}
        assert all(torch.equal(held[name], tensors[name]) for name in held)
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())


def test_blocks_may_be_any_part_of_a_tensor_in_any_layout(tmp_path: Path) -> None:
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = matrix.T  # not contiguous
    specs = {"a": Spec((4, 6), "BF16"), "b": Spec((6, 4), "BF16")}
    pieces = [("a", matrix.reshape(-1)[start : start + 5]) for start in range(0, 24, 5)]
    write_shards(tmp_path, specs, [*pieces, ("b", turned)], max_bytes=10**6)
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["a"], matrix)
    assert torch.equal(written["b"], turned)


@pytest.mark.parametrize("with_blocks", [True, False])
def test_tensors_without_elements_need_no_block_and_may_have_one(tmp_path: Path, with_blocks: bool) -> None:
    empty, shape = torch.zeros(0), torch.zeros(3, 0)
    tensors = {"e1": empty, "a": torch.ones(2), "e2": shape, "b": torch.ones(1), "e3": empty}
    blocks = [(name, tensor) for name, tensor in tensors.items() if with_blocks or tensor.numel()]
    write_shards(tmp_path, specs_of(tensors), blocks, max_bytes=8)
    written = open_checkpoint(tmp_path)
    assert {name: tuple(written[name].shape) for name in written} == {n: tuple(t.shape) for n, t in tensors.items()}


A, B = torch.ones(2), torch.ones(3)
WRONG: dict[str, tuple[list[tuple[str, torch.Tensor]], str]] = {
    "out of order": ([("b", B), ("a", A)], "a block of 'b' came where 8 bytes of 'a' were due"),
    "too large": ([("a", B)], "a block of 'a' came where 8 bytes of 'a' were due"),
    "too small": ([("a", A[:1]), ("b", B)], "a block of 'b' came where 4 bytes of 'a' were due"),
    "too few": ([("a", A)], "a block of None came where 12 bytes of 'b' were due"),
    "too many": ([("a", A), ("b", B), ("c", A)], "a block of 'c' came after the last tensor"),
    "wider": ([("a", A.double()), ("b", B)], "a block of 'a' came where 8 bytes of 'a' were due"),
}


@pytest.mark.parametrize(("blocks", "match"), WRONG.values(), ids=WRONG.keys())
def test_blocks_that_do_not_fit(tmp_path: Path, blocks: list[tuple[str, torch.Tensor]], match: str) -> None:
    specs = {"a": Spec((2,), "F32"), "b": Spec((3,), "F32")}
    with pytest.raises(AssertionError, match=match):
        write_shards(tmp_path, specs, blocks, max_bytes=10**6)


@pytest.mark.parametrize("fault", ["flipped", "lost", "header"])
def test_a_disk_that_loses_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    path, sync = tmp_path / "model.safetensors", os.fsync

    def faulty(handle: int) -> None:
        sync(handle)
        content = bytearray(path.read_bytes())
        content[20 if fault == "header" else -1] ^= 0x80
        path.write_bytes(content[:-4] if fault == "lost" else content)

    monkeypatch.setattr(os, "fsync", faulty)
    with pytest.raises(OutputError, match=r"model.safetensors does not read back as it was written; the disk or the"):
        write(tmp_path, {"a": A})
