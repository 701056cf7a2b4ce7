"""Writing a result so that it is there whole, or not there.

Everything goes into a working folder beside the target, `.OUT.orthomerge-TOKEN`, which has a marker of ours:

new/    what is being written; when it is complete and on disk, one rename makes it the target
old/    what was in the target, for a moment, where the system cannot exchange two folders in one step

A run that fails removes its working folder; one that is killed leaves it, and the next run into the same target brings
`old` back if the target is gone, and removes the rest. A lock beside the target, held until the last step, keeps two
runs apart. A target that is there is replaced only if it is ours, and all that is in it (`files/ownership.py`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from orthomerge.core.errors import OutputError, some
from orthomerge.files.ownership import LOCAL, MANIFEST, STATE, WORKING, why_not_ours
from orthomerge.files.removal import remove_file, remove_working
from orthomerge.files.replacing import sync as _sync

_SPARE = 16 << 20  # room for headers, configs and the card
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100


@contextmanager
def publish(
    out: Path,
    *,
    force: bool = False,
    need: int = 0,
    inputs: Iterable[Path] = (),
    marker: str = MANIFEST,
    unlisted_but_ours: Iterable[str] = (LOCAL,),
) -> Iterator[Path]:
    """Yield a folder to fill; when the block ends without an exception it becomes `out`.

    `need`: bytes that will be written. `inputs`: folders or files that `out` must not be inside of, nor contain.
    `marker`: the file that lists all others of a folder that may be replaced with `force`, except `unlisted_but_ours`:
    files of ours, or files that are in the new folder too.
    """
    out, inputs, unlisted_but_ours = _absolute(out), tuple(inputs), tuple(unlisted_but_ours)
    check = partial(check_target, out, force=force, inputs=inputs, marker=marker, unlisted_but_ours=unlisted_but_ours)
    check()
    lock = _Lock(out)
    try:
        try:
            above = _make_folder(out.parent)
            check_room(out.parent, need)
            lock.take()
        except OSError as error:
            raise OutputError(f"cannot write to {out.parent}: {error.strerror}") from error
        try:
            _clear(out)
            check()  # another run may have finished meanwhile
            new = _make_working(out)
            yield new
            for path in (new, *new.rglob("*")):
                _sync(path)
            check()
            _commit(new, out, partial(why_not_ours, marker=marker, unlisted_but_ours=unlisted_but_ours))
            with suppress(OSError):
                remove_working(new.parent, proof=WORKING)
        except BaseException as error:
            with suppress(OSError):
                _clear(out)
            if not isinstance(error, OSError):
                raise
            lock.release()
            raise OutputError(f"cannot write {out}: {error.strerror or error}; {_left(out)}") from error
    finally:
        lock.release()
    try:
        for folder in above:
            _sync(folder)
    except OSError as error:
        raise OutputError(
            f"{out} is complete, but {folder} could not be synced ({error.strerror}); "
            "check the disk: the output may not survive a power failure"
        ) from error


def check_target(
    out: Path,
    *,
    force: bool = False,
    inputs: Iterable[Path] = (),
    marker: str = MANIFEST,
    unlisted_but_ours: Iterable[str] = (LOCAL,),
) -> None:
    """Refuse a target that overlaps an input, or that exists: with `force`, only if not all that is in it is ours."""
    out = _absolute(out)
    written = [Path(os.path.realpath(path)) for path in (out, *_working_folders(out))]
    for path in inputs:
        source = Path(os.path.realpath(path))
        inside = source.is_dir() and source in written[0].parents
        if inside or any(ours == source or ours in source.parents for ours in written):
            raise OutputError(f"the output {out} overlaps the input {path}; choose another place")
    if not os.path.lexists(out):
        return
    if not force:
        raise OutputError(f"{out} exists already; give --force to replace it, or choose another place")
    try:
        reason = why_not_ours(out, marker, unlisted_but_ours=unlisted_but_ours)
    except OSError as error:
        raise OutputError(f"cannot look into {out}: {error.strerror}; choose another place") from error
    if reason is not None:
        raise OutputError(f"{out} {reason}, so it is not replaced; move it away, or choose another place")


def check_room(folder: Path, need: int) -> None:
    """Refuse to start what the disk cannot hold."""
    try:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}; choose another place") from error
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
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode(errors="backslashreplace"))  # half a surrogate pair, as JSON can hold one


def _absolute(path: Path) -> Path:
    if "\0" in str(path):
        raise OutputError(f"cannot write to {str(path)!r}: a null byte cannot be part of a name")
    try:
        return Path(os.path.abspath(path.expanduser()))
    except RuntimeError as error:  # ~name of nobody
        raise OutputError(f"cannot write to {path}: {error}") from error


def _beside(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.orthomerge-{kind}"


def _left(out: Path) -> str:
    """What a failed run leaves beside its target: usually nothing, or the state of a long fit."""
    folders = [*_working_folders(out), *(path.parent for path in out.parent.glob(f"*/{STATE}"))]
    names = some(sorted(path.name for path in folders if path.name.startswith(f".{out.name}.")))
    if not names:
        return "nothing was left behind"
    return f"{names} was left beside it: the same command goes on from it, or clears it away"


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that must be synced for its name to be on disk."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return [folder, *(each.parent for each in new)]


class _Lock:
    """An exclusive lock on a target: an empty file, for one that is not empty belongs to somebody else.

    Whenever the run is interrupted, `release` leaves no file of ours.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._path = _beside(out, "lock")
        self._handle = -1

    def take(self) -> None:
        for _ in range(3):
            self._open(os.O_CREAT)
            try:
                if self._holds():
                    if self._is_ours():
                        return
                    raise OutputError(f"{self._path} is not a lock of orthomerge; move it away")
            except BlockingIOError as error:
                raise OutputError(f"another run is writing to the same output, {self._out}; wait for it") from error
            self._close()  # the other run finished in between, and removed its lock
        raise OutputError(f"cannot lock {self._path}; is another run busy there?")

    def release(self) -> None:
        with suppress(OSError):
            if self._handle < 0:  # the run may have been interrupted between making the file and storing its handle
                self._open(0)
            if self._holds() and self._is_ours():
                remove_file(self._path)
        self._close()

    def _open(self, flags: int) -> None:
        self._handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)

    def _holds(self) -> bool:
        """Lock the file that was opened; False if it is not the one that has the name any more."""
        fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            return self._path.stat().st_ino == os.fstat(self._handle).st_ino
        except FileNotFoundError:
            return False

    def _is_ours(self) -> bool:
        status = os.fstat(self._handle)
        return stat.S_ISREG(status.st_mode) and status.st_size == 0

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _working_folders(out: Path) -> list[Path]:
    """The working folders of runs into a target, recognised by name."""
    pattern = re.compile(re.escape(_beside(out, "").name) + "[a-z0-9_]{8}")
    try:
        paths = sorted(path for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    except OSError:  # whoever writes there says what is wrong
        return []
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _make_working(out: Path) -> Path:
    """The folder to fill, in a working folder of its own."""
    working = Path(tempfile.mkdtemp(prefix=_beside(out, "").name, dir=out.parent))
    (working / WORKING).touch()
    (working / "new").mkdir()
    return working / "new"


def _clear(out: Path) -> None:
    """Remove the working folders of runs that failed or were killed; an old output in them is restored."""
    for working in _working_folders(out):
        old = working / "old"
        if (working / WORKING).is_file() and old.is_dir() and not os.path.lexists(out):
            old.rename(out)
        remove_working(working, proof=WORKING)  # one without a marker only if it is empty


def _commit(new: Path, out: Path, why_not: Callable[[Path], str | None]) -> None:
    """Make `new` the target in one step; what was there before is beside it afterwards, to be removed."""
    if not os.path.lexists(out):
        new.rename(out)
        return
    exchanged = _exchange(new, out)
    aside = new if exchanged else new.with_name("old")
    if not exchanged:
        out.rename(aside)
    try:
        reason = why_not(aside)  # somebody may have put a file there since the last look
    except OSError as error:
        reason = f"cannot be looked into ({error.strerror})"
    if reason is not None:
        if exchanged:
            _exchange(new, out)
        raise OutputError(f"{out} {reason}, so it is not replaced; move it away, or choose another place")
    if not exchanged:
        new.rename(out)  # should it fail, `_clear` brings the old one back


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
