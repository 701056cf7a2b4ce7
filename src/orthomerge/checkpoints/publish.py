"""Writing a result so that it is there whole, or not there.

Everything goes into a hidden folder beside the target; when it is complete and on disk, one rename makes it the
target. A run that fails removes its folder; one that is killed leaves it, and the next run into the same target
clears it away. A lock in the folder keeps two runs apart.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orthomerge.errors import OutputError

__all__ = ["MANIFEST", "publish", "write_bytes", "write_json"]

MANIFEST = "orthomerge.json"
_LOCK = ".lock"
_SPARE = 16 << 20  # room for headers, configs and the card
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100


@contextmanager
def publish(
    out: Path, *, force: bool = False, need: int = 0, inputs: Iterable[Path] = (), marker: str = MANIFEST
) -> Iterator[Path]:
    """Give a folder to fill; on leaving without an exception it becomes `out`.

    `need`: bytes that will be written. `inputs`: folders or files that `out` must not be inside of, nor contain.
    `marker`: the file by which a folder that may be replaced with `force` is known to be one of ours.
    """
    out = Path(os.path.abspath(out.expanduser()))
    check_target(out, force=force, inputs=inputs, marker=marker)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_room(out.parent, need)
        partial = out.parent / f".{out.name}.partial"
        lock = _claim(partial)
    except OSError as error:
        raise OutputError(f"cannot write to {out.parent}: {error.strerror}") from error
    try:
        try:
            yield partial
            _sync_tree(partial)
            (partial / _LOCK).unlink()
            _commit(partial, out)
        except OSError as error:
            raise OutputError(f"cannot write {out}: {error.strerror or error}; nothing was left behind") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_target(out: Path, *, force: bool = False, inputs: Iterable[Path] = (), marker: str = MANIFEST) -> None:
    """Refuse a target that exists, or that overlaps an input."""
    out = Path(os.path.abspath(out.expanduser()))
    real = out.resolve()
    for given in inputs:
        source = given.resolve()
        if real == source or (source.is_dir() and source in real.parents) or real in source.parents:
            raise OutputError(f"the output {out} overlaps the input {given}; choose another place")
    if not os.path.lexists(out):
        return
    if not force:
        raise OutputError(f"{out} exists already; give --force to replace it, or choose another place")
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / marker).exists()):
        raise OutputError(
            f"{out} was not written by orthomerge (it has no {marker}), so it is not replaced; remove it yourself"
        )


def check_room(folder: Path, need: int) -> None:
    """Refuse to start what the disk cannot hold."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
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
    write_bytes(path, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())


def _claim(partial: Path) -> int:
    """Lock the partial folder and clear what a killed run left in it."""
    for _ in range(3):
        partial.mkdir(exist_ok=True)
        path = partial / _LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the other run finished in between
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise OutputError(
                f"another run is writing to the same output (its work lies in {partial}); wait for it"
            ) from error
        if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
            for left in partial.iterdir():
                if left.name != _LOCK:
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            return lock
        os.close(lock)
    raise OutputError(f"cannot lock {partial}; is another run busy there?")


def _sync_tree(folder: Path) -> None:
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _commit(partial: Path, out: Path) -> None:
    """Make `partial` the target in one step; what was there before is removed only afterwards."""
    if not os.path.lexists(out):
        partial.rename(out)
    elif _exchange(partial, out):
        shutil.rmtree(partial)
    else:
        old = out.parent / f".{out.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        try:
            partial.rename(out)
        except OSError:
            old.rename(out)
            raise
        shutil.rmtree(old)
    _sync_folder(out.parent)


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
