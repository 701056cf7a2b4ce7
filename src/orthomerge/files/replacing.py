"""Replace a single file atomically, and remove files and folders; no other module removes any (a test checks that).

A new file is written beside the old one as `.NAME.TOKEN.partial`, which its writer keeps locked. Only files that
orthomerge provably wrote are removed: folders with a marker, listed files, and partial files that nobody locks.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from orthomerge.core.errors import OutputError
from orthomerge.files.documents import is_plain_name

_NUMBER = re.compile(r"\(os error (\d+)\)")


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file atomically; errors name the file."""
    try:
        with replacing(path) as file:
            for part in parts:
                file.write(part)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; make room, or write elsewhere") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to fill; if the block ends without an exception, it replaces `path`."""
    clear_partials(path.parent, path.name)
    names: list[Path] = []  # listed before the file exists, so that a signal at any time leaves none behind
    try:
        with _open_partial(path, names) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            names[-1].replace(path)
        sync(path.parent)
    except BaseException:
        for partial in names:
            with suppress(OSError):
                remove_file(partial)
        raise


def _open_partial(path: Path, names: list[Path]) -> BinaryIO:
    while True:
        names.append(path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial"))
        file = names[-1].open("xb")
        with suppress(OSError):  # without locks in the file system, no partial file is ever removed as abandoned
            fcntl.flock(file, fcntl.LOCK_SH)  # waits for a process that took it for abandoned and now removes it
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def clear_partials(folder: Path, name: str) -> None:
    """Remove the partial files of a file that killed processes left in its folder."""
    partial = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.partial")
    for path in [path for path in folder.iterdir() if partial.fullmatch(path.name)]:
        remove_abandoned(path)


@contextmanager
def os_errors() -> Iterator[None]:
    """Convert disk errors of safetensors, which has their number in the message only, to OSError."""
    try:
        yield
    except Exception as error:
        number = _NUMBER.search(str(error))
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_file(path: Path) -> None:
    """Remove a file, or a link but not its target; a missing file is not an error."""
    path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def remove_folder(folder: Path, *, proof: str) -> None:
    """Remove a folder and its content, the marker `proof` last; without this marker, only an empty folder."""
    marker = folder / proof
    if marker.is_file() and not marker.is_symlink():
        for path in list(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path != marker:
                with suppress(OSError):
                    remove_file(path)
        if list(folder.iterdir()) == [marker]:
            remove_file(marker)
    remove_empty(folder)


def remove_listed(folder: Path, names: Iterable[str]) -> None:
    """Remove files below a folder, and folders that become empty; unsafe names and links on the way are ignored."""
    for name in filter(is_plain_name, names):
        parents = [folder / parent for parent in PurePosixPath(name).parents if parent.parts]
        if not any(parent.is_symlink() for parent in parents):
            if not (folder / name).is_dir() or (folder / name).is_symlink():
                remove_file(folder / name)
            for parent in parents:
                remove_empty(parent)


def remove_abandoned(path: Path) -> None:
    """Remove a partial file or lock that no process holds locked."""
    with suppress(OSError):  # removed meanwhile, locked, or without permission
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:  # otherwise another file has the name now
                remove_file(path)
        finally:
            os.close(handle)
