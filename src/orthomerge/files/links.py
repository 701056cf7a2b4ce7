"""Check names and links of files in a folder from an unknown source."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from orthomerge.core.errors import CheckpointError
from orthomerge.files.ownership import MANIFEST


def is_plain_name(name: str) -> bool:
    """Return whether a name is a normalised relative path without `..`, such as `topic/config.json`."""
    pure = PurePosixPath(name)
    odd = not name.isprintable() or "\\" in name or ".." in pure.parts or pure.is_absolute()
    return not odd and name != "." and pure.as_posix() == name


def leaves(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder leads outside of it through links.

    Two places do not count as outside: the hub's cache, where every file below snapshots/COMMIT is a link to a file in
    blobs, and the output of ours that the folder is a task of.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real == root or root in real.parents:
        return False
    if any(above.name == "snapshots" and real.parent == above.parent / "blobs" for above in root.parents):
        return False
    return not (real.parent == root.parent and (root.parent / MANIFEST).is_file())


def contained(path: Path, folder: Path) -> Path:
    """Return a path, or refuse it if it is a link that leaves its folder."""
    if leaves(path, folder):
        raise CheckpointError(f"{path} is a link that leaves its folder; copy the file there instead, or remove it")
    return path
