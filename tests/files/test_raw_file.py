"""Files read by position: whatever the order, the hash is that of the file; what changes under us is refused."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from orthomerge.core.errors import CheckpointError
from orthomerge.files.raw_file import RawFile

SIZE = 700_000  # more than two gaps of the hash


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "weights"
    file.write_bytes(random.Random(0).randbytes(SIZE))
    return file


def digest(path: Path) -> str:
    return f"blake3:{blake3(path.read_bytes()).hexdigest()}"


GAP = 1 << 18
ORDERS = {
    "nothing": [],
    "whole": [(0, SIZE)],
    "in order": [(start, 70_000) for start in range(0, SIZE, 70_000)],
    "second half": [(SIZE // 2, SIZE // 2)],
    "small gaps": [(8, 1000), (2000, 1000), (100_000, 50), (SIZE - 3, 3)],
    "gap as large as may be": [(GAP, 100)],
    "gap too large": [(GAP + 1, 100), (0, 10)],
    "overlaps": [(0, 1000), (500, 1000), (1500, 100), (1000, 5000)],
    "empty runs": [(0, 0), (100, 0), (100, 10), (110, 0), (SIZE, 0)],
    "shuffled": random.Random(1).sample([(start, 7_000) for start in range(0, SIZE, 7_000)], SIZE // 7_000),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_the_hash_does_not_depend_on_the_order_of_reading(path: Path, order: list[tuple[int, int]]) -> None:
    content, file, expected = path.read_bytes(), RawFile(path), digest(path)
    for offset, length in order:
        assert bytes(file.read(offset, length).numpy()) == content[offset : offset + length]
    assert file.digest() == expected
    # Reading on after the hash is known changes nothing.
    assert bytes(file.read(10, 10).numpy()) == content[10:20]
    assert file.digest() == expected


def test_reading_in_order_leaves_nothing_to_be_read_for_the_hash(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RawFile(path)
    for start in range(0, SIZE, 70_000):
        file.read(start, 70_000)

    def refuse(*arguments: object) -> int:
        raise AssertionError("read again")

    monkeypatch.setattr(os, "preadv", refuse)
    assert file.digest() == digest(path)


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_read_at_once_do_not_spoil_the_hash(path: Path, seed: int) -> None:
    content, file, draw = path.read_bytes(), RawFile(path), random.Random(seed)
    runs = [(start, 1_000) for start in range(0, SIZE, 1_000)]
    runs = runs if seed == 0 else draw.sample(runs, len(runs))

    def read(run: tuple[int, int]) -> bool:
        if draw.random() < 0.005:
            assert file.digest() == digest(path)
        return bytes(file.read(*run).numpy()) == content[run[0] : run[0] + run[1]]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, runs))
    assert file.digest() == digest(path)


def test_reads_that_come_in_pieces_are_put_together_or_fail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def short(handle: int, buffers: list[memoryview], offset: int) -> int:
        return whole(handle, [buffers[0][:999]], offset)

    file = RawFile(path)
    monkeypatch.setattr(os, "preadv", short)
    assert bytes(file.read(5, 5_000).numpy()) == path.read_bytes()[5:5_005]
    assert file.bytes(100, 2_000) == path.read_bytes()[100:2_100]  # which does not count for the hash
    assert file.digest() == digest(path)

    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"cannot read .*weights at byte 16: Input/output error"):
        file.read(16, 4)


def test_an_empty_file_and_a_read_beyond_the_end(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    file = RawFile(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"empty ends at byte 0, 1 bytes too early; the file was cut short"):
        file.read(0, 1)
    assert (file.size, file.digest()) == (0, f"blake3:{blake3().hexdigest()}")


@pytest.mark.parametrize("how", ["read", "bytes", "digest"])
def test_a_file_cut_short_while_open_is_an_error_and_not_a_crash(path: Path, how: str) -> None:
    file = RawFile(path)
    os.truncate(path, 1_000)
    actions: dict[str, Callable[[], object]] = {
        "read": lambda: file.read(500, 1_000),
        "bytes": lambda: file.bytes(999, 2),
        "digest": file.digest,
    }
    with pytest.raises(CheckpointError, match=r"weights ends at byte 1000, \d+ bytes too early.*fetch it again"):
        actions[how]()
    with pytest.raises(CheckpointError, match="weights changed while it was read; run the command again"):
        file.check_unchanged()


def _rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 1))


def _replace(path: Path) -> None:
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(bytes(SIZE))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time: another file all the same
    other.replace(path)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("change", "what"), [(_rewrite, "changed"), (_replace, "changed"), (_grow, "changed"), (Path.unlink, "vanished")]
)
def test_a_file_that_changed_is_refused(path: Path, change: Callable[[Path], None], what: str) -> None:
    before, file = digest(path), RawFile(path)
    file.check_unchanged()
    change(path)
    assert change is not _replace or file.digest() == before != digest(path)  # read as it was
    with pytest.raises(CheckpointError, match=f"weights {what} while it was read; run the command again"):
        file.check_unchanged()


def test_names_of_no_file_and_of_files_that_are_not_plain(tmp_path: Path) -> None:
    for name, match in (("nowhere", "No such file"), ("x" * 300, "File name too long"), ("a\0b", ".*null byte")):
        with pytest.raises(CheckpointError, match=f"cannot open .*: {match}"):
            RawFile(tmp_path / name)
    os.mkfifo(tmp_path / "fifo")  # opening it the usual way would wait for a writer
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    for odd in (tmp_path / "fifo", tmp_path / "folder", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(CheckpointError, match=rf"{odd} is not a regular file; only plain files are read"):
            RawFile(odd)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(CheckpointError, match=r"cannot open .*socket"):
            RawFile(tmp_path / "socket")


def test_handles_are_closed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        RawFile(path)
        for odd in (tmp_path / "folder", tmp_path / "nowhere"):
            with pytest.raises(CheckpointError):
                RawFile(odd)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
