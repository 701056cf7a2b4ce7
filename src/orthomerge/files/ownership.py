"""Marker files: each identifies a folder that orthomerge wrote and lists every other file in it.

A folder is replaced only if its marker is a JSON object with `format` and `files`, and `files` names every file below
the folder. A link counts as a name and is never followed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from orthomerge.core.errors import CheckpointError, OutputError
from orthomerge.files.documents import read_json

FORMAT = 1
MANIFEST = "orthomerge.json"  # of a merged, aligned or fitted model
LOCAL = "orthomerge.local.json"  # beside a manifest, and not listed in it
EXPORT = "orthomerge-export.json"
EXPERT = "orthomerge-expert.json"
SUITE = "orthomerge-suite.json"  # of a base in a suite's folder
REPORT = "orthomerge-report.json"
WORKING = ".orthomerge-working"  # of a folder that is being filled
STATE = ".orthomerge-state"  # of the state of an unfinished run
_MODELS = (MANIFEST, EXPORT, EXPERT, SUITE)


def names_in(folder: Path) -> Iterator[str]:
    """Yield every file below a folder, as `a/b.json`, and every empty folder, as `a/`. Links are not followed."""
    waiting = [""]
    while waiting:
        start = waiting.pop()
        with os.scandir(folder / start) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        if start and not entries:
            yield start
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{start}{entry.name}/")
            else:
                yield start + entry.name


def listed_files(path: Path) -> Mapping[str, Any] | None:
    """Return what a marker lists, by name; None if the file is not a valid marker."""
    try:
        document = read_json(path) if not path.is_symlink() else {}
    except CheckpointError:
        return None
    number, files = document.get("format"), document.get("files")
    if type(number) is not int or number < 1:
        return None
    if isinstance(files, list) and all(isinstance(name, str) for name in files):
        return dict.fromkeys(files)
    return files if isinstance(files, dict) else None


def why_not_ours(folder: Path, marker: str, *, unlisted_but_ours: Iterable[str] = ()) -> str | None:
    """Return why a folder may not be replaced, as the rest of a sentence that begins with its name; None if it may."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    if is_folder and next(names_in(folder), None) is None:
        return None
    if not is_folder or not os.path.lexists(folder / marker):
        return f"was not written by orthomerge (it has no {marker})"
    listed = listed_files(folder / marker)
    if listed is None:
        return f"was not written by orthomerge (its {marker} has no 'format' and no list of 'files' of ours)"
    ours = {*listed, marker, *unlisted_but_ours}
    folders = {f"{parent}/" for name in ours for parent in PurePosixPath(name).parents}
    foreign = next((name for name in names_in(folder) if name not in ours and name not in folders), None)
    return None if foreign is None else f"holds {foreign!r}, which orthomerge did not write"


def write_marker(folder: Path, marker: str, **about: Any) -> dict[str, Any]:
    """Write the marker of a folder that is otherwise complete and return its content."""
    document = {"format": FORMAT, **about, "files": sorted(name for name in names_in(folder) if name != marker)}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    (folder / marker).write_bytes(text.encode(errors="backslashreplace"))
    return document


def check_no_output(folder: Path) -> None:
    """Refuse a folder that is a model of orthomerge or lies in one, which would not verify with another file."""
    folder = Path(os.path.abspath(folder))
    for each in (folder, *folder.parents):
        for marker in _MODELS:
            if listed_files(each / marker) is not None:
                raise OutputError(f"{each} is a model that orthomerge wrote (it has {marker}); write to another place")
