"""Replace a single file atomically: readers see the complete old file or the complete new one.

The new one is written beside it as `.NAME.TOKEN.partial`, locked for as long as somebody writes it; so the next writer
can tell what a killed one left from what another one is still busy with.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from orthomerge.core.errors import OutputError
from orthomerge.files.removal import remove_abandoned, remove_file

_NUMBER = re.compile(r"\(os error (\d+)\)")


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file atomically; an error names the file."""
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
    names: list[Path] = []  # on the list before the file exists, so that none is left whenever a signal comes
    try:
        with _open(path, names) as file:
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


def clear_partials(folder: Path, name: str = "") -> None:
    """Remove partial files of killed writers in a folder: those of one name, or all."""
    partial = re.compile(rf"\.{re.escape(name) if name else '.+'}\.[0-9a-f]{{16}}\.partial")
    for path in [path for path in folder.iterdir() if partial.fullmatch(path.name)]:
        remove_abandoned(path)


@contextmanager
def os_errors() -> Iterator[None]:
    """Raise faults of the disk as OSError: libraries in Rust (safetensors) put their number into other errors' text."""
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


def _open(path: Path, names: list[Path]) -> BinaryIO:
    """Open a new partial file and lock it, again if another process removed it as abandoned before it was locked."""
    while True:
        names.append(path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial"))
        file = names[-1].open("xb")
        with suppress(OSError):  # a file system without locks: then nobody takes it for abandoned
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()
