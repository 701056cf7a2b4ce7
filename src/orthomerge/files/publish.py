"""Write output folders atomically: a folder appears complete, or not at all.

A working folder beside the target, `.OUT.orthomerge-TOKEN`, contains a marker and

new/    the new output; when it is complete and on disk, it becomes the target by one rename
old/    the former target, for a moment, if the system cannot exchange two folders in one step

A run that fails removes its working folder; if it is killed, the next run into the same target does, and restores
`old` if the target is gone. A lock beside the target, held until the last step, keeps two runs apart.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from orthomerge.core.errors import OutputError, some
from orthomerge.files.folders import LOCAL, MANIFEST, STATE, WORKING, why_not_replaceable
from orthomerge.files.replacing import remove_abandoned, remove_folder, sync

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
    unlisted: Iterable[str] = (LOCAL,),
) -> Iterator[Path]:
    """Yield a folder to fill; when the block ends without an exception it becomes `out`.

    `need`: number of bytes that will be written. `inputs`: folders or files that `out` must neither contain nor be in.
    `marker`: with `force`, a folder is replaced only if this file in it lists all others, except those in `unlisted`.
    """
    out, inputs, unlisted = _absolute(out), tuple(inputs), tuple(unlisted)
    check = partial(check_target, out, force=force, inputs=inputs, marker=marker, unlisted=unlisted)
    check()
    with _locked(out, need) as parents:
        try:
            _clear(out)
            check()  # another run may have finished meanwhile
            working = Path(tempfile.mkdtemp(prefix=_beside(out, "").name, dir=out.parent))
            (working / WORKING).touch()
            new = working / "new"
            new.mkdir()
            yield new
            for path in (new, *new.rglob("*")):
                sync(path)
            check()
            _commit(new, out, marker, unlisted)
            with suppress(OSError):
                remove_folder(working, proof=WORKING)
        except BaseException as error:
            with suppress(OSError):
                _clear(out)
            if isinstance(error, OSError):
                raise OutputError(f"cannot write {out}: {error.strerror or error}; {_left(out)}") from error
            raise
    try:
        for folder in parents:
            sync(folder)
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
    unlisted: Iterable[str] = (LOCAL,),
) -> None:
    """Refuse a target that overlaps an input or exists; with `force`, one may exist if orthomerge wrote all of it."""
    out = _absolute(out)
    written = [Path(os.path.realpath(path)) for path in (out, *_working_folders(out))]
    for path in inputs:
        source = Path(os.path.realpath(path))
        inside = source.is_dir() and source in written[0].parents
        if inside or any(folder == source or folder in source.parents for folder in written):
            raise OutputError(f"the output {out} overlaps the input {path}; choose another place")
    if not os.path.lexists(out):
        return
    if not force:
        raise OutputError(f"{out} exists already; give --force to replace it, or choose another place")
    _check_replaceable(out, out, marker, unlisted)


def _check_replaceable(folder: Path, out: Path, marker: str, unlisted: Iterable[str]) -> None:
    """Refuse to replace a folder that has files of others; messages call it `out`, its path before it was moved."""
    try:
        reason = why_not_replaceable(folder, marker, unlisted=unlisted)
    except OSError as error:
        raise OutputError(f"cannot look into {out}: {error.strerror}; choose another place") from error
    if reason is not None:
        raise OutputError(f"{out} {reason}, so it is not replaced; move it away, or choose another place")


def check_room(folder: Path, need: int) -> None:
    """Refuse to write more than the disk can hold, or into a folder without write permission."""
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


def _absolute(path: Path) -> Path:
    if "\0" in str(path):
        raise OutputError(f"cannot write to {str(path)!r}: a null byte cannot be part of a name")
    try:
        return Path(os.path.abspath(path.expanduser()))
    except RuntimeError as error:  # `~name` of an unknown user
        raise OutputError(f"cannot write to {path}: {error}") from error


def _beside(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.orthomerge-{kind}"


def _left(out: Path) -> str:
    folders = _working_folders(out) + [state.parent for state in out.parent.glob(f".{glob.escape(out.name)}.*/{STATE}")]
    if not folders:
        return "nothing was left behind"
    names = some(sorted(path.name for path in folders))
    return f"{names} was left beside it: the same command continues from it, or removes it"


@contextmanager
def _locked(out: Path, need: int) -> Iterator[list[Path]]:
    """Create the parent folder of a target and lock an empty file beside it; yield the folders to sync at the end."""
    lock, handle = _beside(out, "lock"), -1
    if _is_foreign(lock):
        raise OutputError(f"{lock} is not a lock of orthomerge; move it away")
    try:
        try:
            new = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
            out.parent.mkdir(parents=True, exist_ok=True)
            check_room(out.parent, need)
            handle = _lock_file(lock)
        except BlockingIOError as error:
            raise OutputError(f"another run is writing to the same output, {out}; wait for it") from error
        except OSError as error:
            raise OutputError(f"cannot write to {out.parent}: {error.strerror}") from error
        yield [out.parent, *(folder.parent for folder in new)]
    finally:
        if handle >= 0:
            os.close(handle)
        remove_abandoned(lock)


def _is_foreign(lock: Path) -> bool:
    try:
        status = lock.lstat()
    except OSError:
        return False
    return not stat.S_ISREG(status.st_mode) or status.st_size > 0


def _lock_file(lock: Path) -> int:
    for _ in range(3):
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # another run finished meanwhile, and removed its lock
    raise OutputError(f"cannot lock {lock}, as other runs write to the same output; wait for them")


def _working_folders(out: Path) -> list[Path]:
    pattern = re.compile(re.escape(_beside(out, "").name) + "[a-z0-9_]{8}")
    try:
        paths = sorted(path for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    except OSError:  # the first write to this folder reports the error
        return []
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _clear(out: Path) -> None:
    for working in _working_folders(out):
        old = working / "old"
        if (working / WORKING).is_file() and old.is_dir() and not os.path.lexists(out):
            old.rename(out)
        remove_folder(working, proof=WORKING)


def _commit(new: Path, out: Path, marker: str, unlisted: Iterable[str]) -> None:
    """Rename `new` to the target; the former target is then in the working folder, which the caller removes."""
    if not os.path.lexists(out):
        new.rename(out)
        return
    exchanged = _exchange(new, out)
    old = new if exchanged else out.rename(new.with_name("old"))
    try:
        _check_replaceable(old, out, marker, unlisted)  # somebody may have put a file there since the last check
    except OutputError:
        if exchanged:
            _exchange(new, out)
        raise  # otherwise `_clear` restores the old one, as it does if the following rename fails
    if not exchanged:
        new.rename(out)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; return False if kernel or file system do not support it."""
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
