"""Writing a result so that it is there whole, or not there.

Everything goes into a hidden folder beside the target; when it is complete and on disk, one rename makes it the
target. A run that fails removes its folder; one that is killed leaves it, and the next run into the same target
clears it away. A lock beside it, held until the last step, keeps two runs apart.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from orthomerge.checkpoints.replacing import sync as _sync
from orthomerge.errors import OutputError, some

__all__ = ["MANIFEST", "check_room", "check_target", "publish", "write_bytes", "write_json"]

MANIFEST = "orthomerge.json"
_SPARE = 16 << 20  # room for headers, configs and the card
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_under_way: set[Path] = set()  # folders that are being filled; outputs inside of them are nobody's but the run's own


@contextmanager
def publish(
    out: Path, *, force: bool = False, need: int = 0, inputs: Iterable[Path] = (), marker: str = MANIFEST
) -> Iterator[Path]:
    """Give a folder to fill; on leaving without an exception it becomes `out`.

    `need`: bytes that will be written. `inputs`: folders or files that `out` must not be inside of, nor contain.
    `marker`: the file by which a folder that may be replaced with `force` is known to be one of ours.
    """
    out, inputs = _absolute(out), tuple(inputs)
    check_target(out, force=force, inputs=inputs, marker=marker)
    partial, lock = _beside(out, "partial"), _Lock(out)
    inner = not _under_way.isdisjoint(out.parents)  # then whoever fills the outer one tells what is wrong
    try:
        try:
            above = _make_folder(out.parent)
            check_room(out.parent, need)
            lock.take()
        except OSError as error:
            if inner:
                raise
            raise OutputError(f"cannot write to {out.parent}: {error.strerror}") from error
        try:
            _clear(out)
            check_target(out, force=force, inputs=inputs, marker=marker)  # another run may have finished meanwhile
            partial.mkdir()
            _under_way.add(partial)
            yield partial
            for path in (partial, *partial.rglob("*")):
                _sync(path)
            check_target(out, force=force, inputs=inputs, marker=marker)
            _commit(partial, out)
        except BaseException as error:
            _undo(out)
            if inner or not isinstance(error, OSError):
                raise
            lock.release()
            raise OutputError(f"cannot write {out}: {error.strerror or error}; {_left(out)}") from error
    finally:
        _under_way.discard(partial)
        lock.release()
    try:
        for folder in () if inner else above:
            _sync(folder)
    except OSError as error:
        raise OutputError(
            f"{out} is complete, but {folder} could not be synced ({error.strerror}); "
            "check the disk: the output may not survive a power failure"
        ) from error


def check_target(out: Path, *, force: bool = False, inputs: Iterable[Path] = (), marker: str = MANIFEST) -> None:
    """Refuse a target that exists, or that overlaps an input."""
    out = _absolute(out)
    real, partial = Path(os.path.realpath(out)), Path(os.path.realpath(out.parent)) / _beside(out, "partial").name
    for given in inputs:
        source = Path(os.path.realpath(given))
        inside = source.is_dir() and source in real.parents
        if inside or any(ours == source or ours in source.parents for ours in (real, partial)):
            raise OutputError(f"the output {out} overlaps the input {given}; choose another place")
    if not os.path.lexists(out):
        return
    if not force:
        raise OutputError(f"{out} exists already; give --force to replace it, or choose another place")
    try:
        ours = not out.is_symlink() and out.is_dir() and ((out / marker).exists() or not any(out.iterdir()))
    except OSError as error:
        raise OutputError(f"cannot look into {out}: {error.strerror}; choose another place") from error
    if not ours:
        raise OutputError(
            f"{out} was not written by orthomerge (it has no {marker}), so it is not replaced; remove it yourself"
        )


def check_room(folder: Path, need: int) -> None:
    """Refuse to start what the disk cannot hold."""
    try:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}; choose another place") from error
    if free < need + _SPARE:
        raise OutputError(
            f"{folder} has {free / 1e9:.2f} GB free, but the output needs {(need + _SPARE) / 1e9:.2f} GB; "
            "make room, or write elsewhere"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} cannot be written to; choose another place, or change its permissions")


def write_bytes(path: Path, data: bytes) -> None:
    """A small file, on disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, document: Any) -> None:
    """A JSON file, on disk when this returns."""
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode(errors="backslashreplace"))  # half a surrogate pair, as JSON can hold one


def _absolute(path: Path) -> Path:
    if "\0" in str(path):
        raise OutputError(f"cannot write to {str(path)!r}: a null byte cannot be part of a name")
    try:
        return Path(os.path.abspath(path.expanduser()))
    except RuntimeError as error:  # ~name of nobody
        raise OutputError(f"cannot write to {path}: {error}") from error


def _beside(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.{kind}"


def _left(out: Path) -> str:
    """What a failed run leaves beside its target: as a rule nothing, or the state of a long fit."""
    found = some(path.name for path in sorted(out.parent.glob(f".{escape(out.name)}.*")))
    if not found:
        return "nothing was left behind"
    return f"{found} was left beside it: the same command goes on from it, or clears it away"


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it; gives all whose names must be on disk for it to be found."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return [folder, *(each.parent for each in new)]


class _Lock:
    """Being the only run that writes to a target. Whenever it is interrupted, `release` leaves no file of ours."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._path = _beside(out, "lock")
        self._handle = -1

    def take(self) -> None:
        for _ in range(3):
            self._open(os.O_CREAT)
            try:
                if self._holds():
                    return
            except BlockingIOError as error:
                partial = _beside(self._out, "partial")
                raise OutputError(
                    f"another run is writing to the same output (its work lies in {partial}); wait for it"
                ) from error
            self._close()  # the other run finished in between, and took its lock away
        raise OutputError(f"cannot lock {self._path}; is another run busy there?")

    def release(self) -> None:
        with suppress(OSError):
            if self._handle < 0:  # it may have been interrupted when the file was there and we did not know it yet
                self._open(0)
            if self._holds():
                self._path.unlink()
        self._close()

    def _open(self, flags: int) -> None:
        self._handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)

    def _holds(self) -> bool:
        """Lock the file that was opened; False if it is not the one that has the name any more."""
        fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            return self._path.stat().st_ino == os.fstat(self._handle).st_ino
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _clear(out: Path) -> None:
    """Clear away what a killed run left; what it had moved out of the way comes back."""
    partial, old = _beside(out, "partial"), _beside(out, "old")
    if old.is_dir() and not os.path.lexists(out):
        old.rename(out)
    for left in (partial, old):
        if os.path.lexists(left):
            shutil.rmtree(left)


def _undo(out: Path) -> None:
    """After a failure: what was there before is there, and nothing of ours beside it."""
    old = _beside(out, "old")
    if os.path.lexists(old):
        with suppress(OSError):
            if not os.path.lexists(out):
                old.rename(out)
        if os.path.lexists(out):
            shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(_beside(out, "partial"), ignore_errors=True)


def _commit(partial: Path, out: Path) -> None:
    """Make `partial` the target in one step; what was there before is removed only afterwards."""
    if not os.path.lexists(out):
        partial.rename(out)
    elif _exchange(partial, out):
        shutil.rmtree(partial, ignore_errors=True)
    else:
        old = _beside(out, "old")
        out.rename(old)
        partial.rename(out)  # should it fail, `_undo` brings the old one back
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically, where kernel and file system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))
