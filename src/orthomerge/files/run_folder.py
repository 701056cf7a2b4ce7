"""Run folders, into which several commands write files: a list names those that orthomerge wrote.

RUN/orthomerge-run.json   `format`, `kind` (evaluation, run or sweep), `files`

A name is on the list before its file is written. A file under one of our names that is not on the list is somebody
else's: it is never replaced or removed. Models and reports in a run folder have markers of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from orthomerge.core.errors import OutputError
from orthomerge.files.documents import read_json
from orthomerge.files.ownership import FORMAT, check_no_output, listed_files
from orthomerge.files.removal import remove_empty, remove_file, remove_listed
from orthomerge.files.replacing import replace_file

RUN = "orthomerge-run.json"
_KIND = "evaluation"


def ours_in(run: Path) -> set[str]:
    """Return the names on the list whose files exist."""
    return {name for name in _listed(run)[1] if os.path.lexists(run / name)}


def check_claim(run: Path, names: Iterable[str], *, kind: str | None = None) -> None:
    """Refuse to replace files that are not on the list, and to write into a model or a run of another kind."""
    if os.path.lexists(run) and not run.is_dir():
        raise OutputError(f"cannot write the run to {run}: it is no folder; give another folder")
    check_no_output(run)
    recorded, files = _listed(run)
    if kind is not None and recorded not in (None, _KIND, kind):
        raise OutputError(f"{run} holds a {recorded}, not a {kind}; give another folder")
    for name in names:
        for parent in PurePosixPath(name).parents:
            if parent.parts and (run / parent).is_symlink():
                raise OutputError(f"{run / parent} is a link, and nothing is written through links; move it away")
        if name not in files and os.path.lexists(run / name):
            raise OutputError(
                f"{run / name} was not written by orthomerge, so it is not replaced; move it away, or give another "
                "folder"
            )


def claim(run: Path, names: Iterable[str], *, kind: str | None = None) -> None:
    """Add names to the list; call it before the files are written."""
    names = list(names)
    check_claim(run, names, kind=kind)
    recorded, files = _listed(run)
    wanted = (kind or recorded or _KIND, files | set(names))
    if wanted != (recorded, files):
        run.mkdir(parents=True, exist_ok=True)
        _write(run, *wanted)


@contextmanager
def claimed(run: Path, names: Iterable[str]) -> Iterator[None]:
    """Claim files that the block writes; if it fails, remove those that did not exist before."""
    before = [path for path in (run, *run.parents) if not path.exists()]
    listed, new = os.path.lexists(run / RUN), [name for name in names if not os.path.lexists(run / name)]
    try:
        claim(run, names)
        yield
    except BaseException:
        with suppress(OSError, OutputError):
            drop(run, new)
            if not listed:
                remove_file(run / RUN)
        for path in before:
            remove_empty(path)
        raise


def drop(run: Path, names: Iterable[str]) -> None:
    """Remove files that are on the list and their names from it; files that are not on the list stay."""
    kind, files = _listed(run)
    gone = files & set(names)
    if gone:
        remove_listed(run, sorted(gone))
        _write(run, kind or _KIND, files - gone)


def _listed(run: Path) -> tuple[str | None, set[str]]:
    """Return the kind of a run (None without a list) and the names on the list."""
    path = run / RUN
    if not os.path.lexists(path):
        return None, set()
    files = listed_files(path)
    if files is None:
        raise OutputError(f"{path} is not the list of a run folder of ours; move it away, or give another folder")
    return str(read_json(path).get("kind", _KIND)), set(files)


def _write(run: Path, kind: str, files: set[str]) -> None:
    document = {"format": FORMAT, "kind": kind, "files": sorted(files)}
    replace_file(run / RUN, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
