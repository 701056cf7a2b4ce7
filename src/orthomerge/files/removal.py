"""The only module that removes files and folders; a test looks for others.

A folder is removed only with a proof that this program wrote it: a marker of ours in it or in a folder above it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath


def remove_file(path: Path) -> None:
    """Remove a file that this program wrote; a link is removed, not what it leads to. No file is no error."""
    path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    with suppress(OSError):
        folder.rmdir()


def remove_tree(folder: Path, *, proof: str) -> None:
    """Remove a folder with all that is in it. `proof`: a file of ours that is in it, or in a folder above it."""
    if not any(_is_plain_file(each / proof) for each in (folder, *folder.parents)):
        raise AssertionError(f"neither {folder} nor a folder above it has a {proof}, so it is not removed")
    shutil.rmtree(folder)


def remove_working(folder: Path, *, proof: str) -> None:
    """Remove a working folder, its marker `proof` last; whatever cannot be removed stays, with the marker."""
    if _is_plain_file(folder / proof):
        for path in list(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != proof:
                with suppress(OSError):
                    path.unlink()
        if [path.name for path in folder.iterdir()] == [proof]:
            (folder / proof).unlink()
    remove_empty(folder)


def remove_listed(folder: Path, names: Iterable[str]) -> None:
    """Remove files below a folder, and the folders that this leaves empty.

    A name that is not plain or relative, or that leads through a link, is left alone.
    """
    names = [name for name in names if _is_below(folder, name)]
    for name in names:
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            remove_file(folder / name)
    parents = {folder / parent for name in names for parent in PurePosixPath(name).parents if parent.parts}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        remove_empty(parent)


def _is_below(folder: Path, name: str) -> bool:
    pure = PurePosixPath(name)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in name:
        return False
    return not any((folder / parent).is_symlink() for parent in pure.parents if parent.parts)


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
