"""Remove files and folders. No other module does; a test checks that.

Everything that is removed was provably written by orthomerge: a folder by a marker in it, a file by a list, a partial
file by its name and the lock that its writer held.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from orthomerge.files.links import is_plain_name


def remove_file(path: Path) -> None:
    """Remove a file that this program wrote; a link is removed, not what it leads to. No file is no error."""
    path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    with suppress(OSError):
        folder.rmdir()


def remove_folder(folder: Path, *, proof: str) -> None:
    """Remove a folder with all that is in it, its marker `proof` last; one without the marker only if it is empty.

    Whatever cannot be removed stays, with the marker.
    """
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
    """Remove files below a folder, and the folders that this leaves empty.

    A name that is not plain, or that leads through a link, is left alone.
    """
    for name in filter(is_plain_name, names):
        parents = [folder / parent for parent in PurePosixPath(name).parents if parent.parts]
        if not any(parent.is_symlink() for parent in parents):
            if not (folder / name).is_dir() or (folder / name).is_symlink():
                remove_file(folder / name)
            for parent in parents:
                remove_empty(parent)


def remove_abandoned(path: Path) -> None:
    """Remove a partial file or lock that no process holds locked."""
    with suppress(OSError):  # gone meanwhile, or not to be removed
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:  # otherwise the name is that of another file by now
                remove_file(path)
        finally:
            os.close(handle)
