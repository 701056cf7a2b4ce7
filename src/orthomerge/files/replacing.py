"""Replacing a single file in one step: what is read there is the old file or the new one, whole and on disk.

The new one is written beside it under a name of its own, and locked for as long as somebody writes it; so whoever comes
later can tell what a killed writer left from what another one is still busy with.
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
from orthomerge.files.removal import remove_file

_NUMBER = re.compile(r"\(os error (\d+)\)")


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file, or leave the one that is there as it is; an error names the file."""
    try:
        clear_partials(path.parent, f".{path.name}")
        with replacing(path, f".{path.name}") as file:
            file.write(data)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; make room, or write elsewhere") from error


@contextmanager
def replacing(path: Path, stem: str) -> Iterator[BinaryIO]:
    """A file to fill, STEM.TOKEN.partial beside `path`; on leaving without an exception it takes its place."""
    tried: list[Path] = []  # known before they exist, so that none is left whenever a signal comes
    try:
        file = _open(path.parent, stem, tried)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            tried[-1].replace(path)
        sync(path.parent)
    except BaseException:
        for partial in tried:
            with suppress(OSError):
                remove_file(partial)
        raise


def clear_partials(folder: Path, stem: str) -> None:
    """Remove what killed writers left of a file: STEM.TOKEN.partial, with a token as `replacing` makes it."""
    pattern = re.compile(re.escape(stem) + r"\.[0-9a-f]{16}\.partial")
    for left in [path for path in folder.iterdir() if pattern.fullmatch(path.name)]:
        clear_abandoned(left)


def clear_abandoned(partial: Path) -> None:
    """Remove a file that nobody writes any more; one that somebody does is left alone."""
    with suppress(OSError):  # gone meanwhile, or not to be removed
        handle = os.open(partial, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_file(partial)
        finally:
            os.close(handle)


@contextmanager
def os_errors() -> Iterator[None]:
    """Faults of the disk as what they are: libraries in Rust (safetensors) tell them in their own errors' text."""
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


def _open(folder: Path, stem: str, tried: list[Path]) -> BinaryIO:
    """A new file, locked. Somebody may find it before it is, and take it for left: then another is made."""
    while True:
        tried.append(folder / f"{stem}.{secrets.token_hex(8)}.partial")
        file = tried[-1].open("xb")
        with suppress(OSError):  # a file system without locks: then nobody takes it for left
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()
