"""Shards: cut where they should be, readable by everybody, and what lies on disk is what was meant."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file

from orthomerge.core.errors import OutputError
from orthomerge.files.checkpoint import DTYPES, Spec
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.safetensors import Written, plan_shards, write_shards

NAMES = {getattr(torch, name): short for short, (_, name) in DTYPES.items()}
INDEX = "model.safetensors.index.json"


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, Spec]:
    return {name: Spec(tuple(tensor.shape), NAMES[tensor.dtype]) for name, tensor in tensors.items()}


def random(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{number}.weight": torch.randn(4, 5, generator=generator) for number in range(count)}


def _sized(*sizes: int) -> dict[str, Spec]:
    return {f"t{number}": Spec((size,), "U8") for number, size in enumerate(sizes)}


PLANS: dict[str, tuple[tuple[int, ...], int, list[list[int]]]] = {
    "nothing": ((), 10, [[]]),
    "all in one": ((5, 5), 10, [[5, 5]]),
    "one byte too many": ((5, 6), 10, [[5], [6]]),
    "too large for any": ((11,), 10, [[11]]),
    "too large, first": ((11, 1), 10, [[11], [1]]),
    "too large, between": ((1, 11, 1), 10, [[1], [11], [1]]),
    "full to the brim": ((10, 10), 10, [[10], [10]]),
    "no reordering": ((6, 6, 4, 4), 10, [[6], [6, 4], [4]]),
    "empty tensors": ((0, 10, 0, 1, 0), 10, [[0, 10, 0], [1, 0]]),
    "one each": ((1, 1, 1), 1, [[1], [1], [1]]),
}


@pytest.mark.parametrize(("sizes", "most", "expected"), PLANS.values(), ids=PLANS.keys())
def test_where_shards_are_cut(sizes: tuple[int, ...], most: int, expected: list[list[int]]) -> None:
    specs = _sized(*sizes)
    shards = plan_shards(specs, most)
    assert [[spec.nbytes for spec in shard.values()] for shard in shards] == expected
    assert [name for shard in shards for name in shard] == list(specs)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    tensors = random()
    counts: list[int] = []
    written = write_shards(tmp_path, specs_of(tensors), tensors.items(), most=10**9, progress=counts.append)
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
    written = write_shards(tmp_path, specs_of(tensors), tensors.items(), most=160)
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


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{len(shape)}.{0 in shape}": torch.zeros(shape, dtype=getattr(torch, name))
        for dtype, (_, name) in DTYPES.items()
        for shape in ((2, 3), (), (0,), (0, 2))
    }
    write_shards(tmp_path, specs_of(tensors), tensors.items(), most=50)
    written = open_checkpoint(tmp_path)
    assert set(written) == set(tensors)
    assert all(written[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert all(written[name].shape == tensor.shape for name, tensor in tensors.items())


def test_blocks_may_be_any_part_of_a_tensor_in_any_layout(tmp_path: Path) -> None:
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = matrix.T  # not contiguous
    specs = {"a": Spec((4, 6), "BF16"), "b": Spec((6, 4), "BF16")}
    pieces = [("a", matrix.reshape(-1)[start : start + 5]) for start in range(0, 24, 5)]
    write_shards(tmp_path, specs, [*pieces, ("b", turned)], most=10**6)
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["a"], matrix)
    assert torch.equal(written["b"], turned)


@pytest.mark.parametrize("with_blocks", [True, False])
def test_tensors_without_elements_need_no_block_and_may_have_one(tmp_path: Path, with_blocks: bool) -> None:
    empty, shape = torch.zeros(0), torch.zeros(3, 0)
    tensors = {"e1": empty, "a": torch.ones(2), "e2": shape, "b": torch.ones(1), "e3": empty}
    blocks = [(name, tensor) for name, tensor in tensors.items() if with_blocks or tensor.numel()]
    write_shards(tmp_path, specs_of(tensors), blocks, most=8)
    written = open_checkpoint(tmp_path)
    assert {name: tuple(written[name].shape) for name in written} == {n: tuple(t.shape) for n, t in tensors.items()}


A, B = torch.ones(2), torch.ones(3)
WRONG: dict[str, tuple[list[tuple[str, torch.Tensor]], str]] = {
    "out of order": ([("b", B), ("a", A)], "a block of 'b' came where 8 bytes of 'a' were due"),
    "unknown": ([("c", A)], "a block of 'c' came where 8 bytes of 'a' were due"),
    "too large": ([("a", B)], "a block of 'a' came where 8 bytes of 'a' were due"),
    "too large in the end": ([("a", A[:1]), ("a", A)], "a block of 'a' came where 4 bytes of 'a' were due"),
    "too small": ([("a", A[:1]), ("b", B)], "a block of 'b' came where 4 bytes of 'a' were due"),
    "too few": ([("a", A)], "a block of None came where 12 bytes of 'b' were due"),
    "none": ([], "a block of None came where 8 bytes of 'a' were due"),
    "too many": ([("a", A), ("b", B), ("c", A)], "a block of 'c' came after the last tensor"),
    "wider": ([("a", A.double()), ("b", B)], "a block of 'a' came where 8 bytes of 'a' were due"),
}


@pytest.mark.parametrize(("blocks", "match"), WRONG.values(), ids=WRONG.keys())
def test_blocks_that_do_not_fit_are_a_defect_of_ours(
    tmp_path: Path, blocks: list[tuple[str, torch.Tensor]], match: str
) -> None:
    specs = {"a": Spec((2,), "F32"), "b": Spec((3,), "F32")}
    with pytest.raises(AssertionError, match=match):
        write_shards(tmp_path, specs, blocks, most=10**6)


def test_an_error_of_the_stream_is_passed_on(tmp_path: Path) -> None:
    def blocks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", A
        raise ZeroDivisionError("the merge failed")

    with pytest.raises(ZeroDivisionError, match="the merge failed"):
        write_shards(tmp_path, {"a": Spec((2,), "F32"), "b": Spec((3,), "F32")}, blocks(), most=10**6)


def test_a_file_that_is_there_already_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write_shards(tmp_path, {"a": Spec((2,), "F32")}, [("a", A)], most=10**6)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("fault", ["flipped", "lost", "header"])
def test_a_disk_that_does_not_keep_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path, sync = tmp_path / "model.safetensors", os.fsync

    def faulty(handle: int) -> None:
        sync(handle)
        content = bytearray(path.read_bytes())
        if fault == "flipped":
            content[-1] ^= 1
        elif fault == "lost":
            del content[-4:]
        else:
            content[20] ^= 0x80
        path.write_bytes(content)

    monkeypatch.setattr(os, "fsync", faulty)
    with pytest.raises(OutputError, match=r"model.safetensors does not read back as it was written; the disk or the"):
        write_shards(tmp_path, {"a": Spec((2,), "F32")}, [("a", A)], most=10**6)
