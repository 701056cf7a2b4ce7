"""Weight files, read by position and hashed while they are read, and tensors in memory, which are read like files.

Files are read with `pread`, not memory-mapped: a file that shrinks meanwhile causes an error, not a crash. Every byte
that a merge reads or writes is hashed, and BLAKE3 is several times as fast as SHA-256.
"""

from __future__ import annotations

import os
import stat
import threading
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from orthomerge.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_GAP = 1 << 18  # bytes; a smaller gap between sequential reads is read at once, for the hash
_STEP = 1 << 20


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of bytes, such as `blake3:1f2e...`."""
    return digest_text(blake3(data))


def digest_text(hasher: blake3) -> str:
    return f"blake3:{hasher.hexdigest()}"


class RawFile:
    """An open file, thread-safe; if its bytes are read in order, hashing it needs no second read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        except ValueError as error:  # a null byte in the name
            raise CheckpointError(f"cannot open {str(path)!r}: {error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file; only plain files are read")
        self.size = status.st_size
        self._stamp = _stamp(status)
        self._lock = threading.Lock()
        self._hasher = blake3()
        self._hashed = 0  # number of bytes, from the start

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def whole(self, most: int) -> bytes:
        """Read the whole file, which must have at most `most` bytes, without updating the hash."""
        if self.size > most:
            raise CheckpointError(f"{self.path} must have at most {most} bytes, got {self.size}; give a smaller file")
        return self.bytes(0, self.size)

    def bytes(self, offset: int, length: int) -> bytes:
        """Read a few bytes without updating the hash."""
        data = bytearray(length)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def stream(self) -> FileIO:
        return FileIO(os.dup(self._fd))

    def read(self, offset: int, length: int) -> torch.Tensor:
        """Read bytes into a new uint8 tensor, and update the hash if they come next in the file."""
        import torch

        buffer = torch.empty(length, dtype=torch.uint8)
        view = buffer.numpy().data
        self._fill(view, offset)
        with self._lock:
            if offset - _GAP <= self._hashed < offset + length:
                if offset > self._hashed:
                    self._hash(memoryview(self.bytes(self._hashed, offset - self._hashed)))
                self._hash(view[self._hashed - offset :])
        return buffer

    def digest(self) -> str:
        """Return the hash of the whole file; only bytes that are not yet hashed are read."""
        with self._lock:
            buffer = bytearray(_STEP)
            while self._hashed < self.size:
                view = memoryview(buffer)[: min(_STEP, self.size - self._hashed)]
                self._fill(view, self._hashed)
                self._hash(view)
        return digest_text(self._hasher)

    def check_unchanged(self) -> None:
        """Refuse a file that was replaced or rewritten since it was opened."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise CheckpointError(f"{self.path} vanished while it was read; run the command again") from error
        if _stamp(status) != self._stamp:
            raise CheckpointError(f"{self.path} changed while it was read; run the command again")

    def _hash(self, view: memoryview) -> None:
        self._hasher.update(view)
        self._hashed += len(view)

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                what = f"cannot read {self.path} at byte {offset}: {error.strerror}"
                raise CheckpointError(f"{what}; check the disk or file server, and run the command again") from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset + done}, {len(view) - done} bytes too early; "
                    "the file was cut short: fetch it again"
                )
            done += count


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


class MemoryTensor:
    """A tensor in memory, read like a file; `path` is used in messages only."""

    def __init__(self, path: Path, tensor: torch.Tensor) -> None:
        self.path, self._tensor = path, tensor
        self.size = tensor.numel() * tensor.element_size()
        self._version = tensor._version  # noqa: SLF001 - torch counts changes there and nowhere else

    def read(self, offset: int, length: int) -> torch.Tensor:
        import torch

        data = self._tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return data[offset : offset + length].clone()

    def digest(self) -> str:
        return digest_of(self.read(0, self.size).numpy().data)

    def check_unchanged(self) -> None:
        """Refuse a model that was trained or edited since it was opened."""
        if self._tensor._version != self._version:  # noqa: SLF001
            raise CheckpointError(f"{self.path} changed since it was opened; open it again")
