"""Ownership of files: markers, which list what orthomerge wrote into a folder, and links that leave a folder.

A marker is a JSON file with `format` and `files`, the names of all other files that orthomerge wrote into its folder.
A folder is replaced only if its marker lists every file below it. Links are listed like files and never followed.
Several commands write into a run folder: its marker, `orthomerge-run.json`, also has a `kind` (evaluation, run or
sweep), lists a name before its file is written, and leaves models and reports to their own markers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from orthomerge.core.errors import CheckpointError, OutputError
from orthomerge.files.documents import json_bytes, read_json, write_json
from orthomerge.files.replacing import remove_empty, remove_file, remove_listed, replace_file

FORMAT = 1
MANIFEST = "orthomerge.json"  # of a merged, aligned or fitted model
LOCAL = "orthomerge.local.json"  # beside a manifest, and not listed in it
EXPORT = "orthomerge-export.json"
EXPERT = "orthomerge-expert.json"
SUITE = "orthomerge-suite.json"  # of a base in a suite's folder
REPORT = "orthomerge-report.json"
RUN = "orthomerge-run.json"
WORKING = ".orthomerge-working"  # of a folder that is being filled
STATE = ".orthomerge-state"  # of the state of an unfinished run
_MODELS = (MANIFEST, EXPORT, EXPERT, SUITE)
_KIND = "evaluation"


def leaves(path: Path, folder: Path) -> bool:
    """Return whether links lead out of a folder; `blobs` in the hub's cache and the folder's own output are inside."""
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real == root or root in real.parents:
        return False
    if any(parent.name == "snapshots" and real.parent == parent.parent / "blobs" for parent in root.parents):
        return False
    return not (real.parent == root.parent and (root.parent / MANIFEST).is_file())


def contained(path: Path, folder: Path) -> Path:
    """Return the path, unless it is a link that leaves its folder, which is an error."""
    if leaves(path, folder):
        raise CheckpointError(f"{path} is a link that leaves its folder; copy the file there instead, or remove it")
    return path


def names_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files (`a/b.json`) and empty folders (`a/`) below a folder, without following links."""
    pending = [""]
    while pending:
        start = pending.pop()
        with os.scandir(folder / start) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        if start and not entries:
            yield start
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(f"{start}{entry.name}/")
            else:
                yield start + entry.name


def listed_files(path: Path) -> Mapping[str, Any] | None:
    """Return the files that a marker lists, by name, or None if it is not a valid marker."""
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


def why_not_replaceable(folder: Path, marker: str, *, unlisted: Iterable[str] = ()) -> str | None:
    """Return the reason why a folder must not be replaced, worded to follow its name in a message, or None."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    if is_folder and next(names_in(folder), None) is None:
        return None
    if not is_folder or not os.path.lexists(folder / marker):
        return f"was not written by orthomerge (it has no {marker})"
    listed = listed_files(folder / marker)
    if listed is None:
        return f"was not written by orthomerge (its {marker} has no valid 'format' or 'files')"
    files = {*listed, marker, *unlisted}
    folders = {f"{parent}/" for name in files for parent in PurePosixPath(name).parents}
    foreign = next((name for name in names_in(folder) if name not in files and name not in folders), None)
    return None if foreign is None else f"holds {foreign!r}, which orthomerge did not write"


def write_marker(folder: Path, marker: str, **about: Any) -> dict[str, Any]:
    """Write the marker of a folder that is otherwise complete, and return its content."""
    document = {"format": FORMAT, **about, "files": sorted(names_in(folder))}
    write_json(folder / marker, document)
    return document


def check_no_output(folder: Path) -> None:
    """Refuse a folder that is, or is inside, a model of orthomerge, whose check would fail with another file in it."""
    folder = Path(os.path.abspath(folder))
    for path in (folder, *folder.parents):
        for marker in _MODELS:
            if listed_files(path / marker) is not None:
                raise OutputError(f"{path} is a model that orthomerge wrote (it has {marker}); write to another place")


def existing_files(run: Path) -> set[str]:
    return {name for name in _listed(run)[1] if os.path.lexists(run / name)}


def check_claim(run: Path, names: Iterable[str], *, kind: str | None = None) -> None:
    """Refuse to replace files that are not listed, and to write into a model or a run of another kind."""
    if os.path.lexists(run) and not run.is_dir():
        raise OutputError(f"cannot write the run to {run}: it is not a folder; give another folder")
    check_no_output(run)
    recorded, files = _listed(run)
    if kind is not None and recorded not in (None, _KIND, kind):
        raise OutputError(f"{run} holds a {recorded}, not a {kind}; give another folder")
    for name in names:
        for parent in PurePosixPath(name).parents:
            if parent.parts and (run / parent).is_symlink():
                raise OutputError(f"{run / parent} is a link, and nothing is written through links; move it away")
        if name not in files and os.path.lexists(run / name):
            raise OutputError(f"{run / name} was not written by orthomerge, so it is not replaced; move it away")


def claim(run: Path, names: Iterable[str], *, kind: str | None = None) -> None:
    """Add names to the list of a run folder; call it before the files are written."""
    names = list(names)
    check_claim(run, names, kind=kind)
    recorded, files = _listed(run)
    content = (kind or recorded or _KIND, files | set(names))
    if content != (recorded, files):
        run.mkdir(parents=True, exist_ok=True)
        _write_list(run, *content)


@contextmanager
def claimed(run: Path, names: Iterable[str]) -> Iterator[None]:
    """Claim files that the block writes; if it fails, remove those that did not exist before."""
    created = [path for path in (run, *run.parents) if not path.exists()]
    listed, new = os.path.lexists(run / RUN), [name for name in names if not os.path.lexists(run / name)]
    try:
        claim(run, names)
        yield
    except BaseException:
        with suppress(OSError, OutputError):
            drop(run, new)
            if not listed:
                remove_file(run / RUN)
        for path in created:
            remove_empty(path)
        raise


def drop(run: Path, names: Iterable[str]) -> None:
    """Remove listed files, and their names from the list; files that are not listed are kept."""
    kind, files = _listed(run)
    dropped = files & set(names)
    if dropped:
        remove_listed(run, sorted(dropped))
        _write_list(run, kind or _KIND, files - dropped)


def _listed(run: Path) -> tuple[str | None, set[str]]:
    path = run / RUN
    if not os.path.lexists(path):
        return None, set()
    files = listed_files(path)
    if files is None:
        raise OutputError(f"{path} is not a valid list of a run folder; move it away, or give another folder")
    return str(read_json(path).get("kind", _KIND)), set(files)


def _write_list(run: Path, kind: str, files: set[str]) -> None:
    replace_file(run / RUN, json_bytes({"format": FORMAT, "kind": kind, "files": sorted(files)}))
