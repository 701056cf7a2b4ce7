"""Who is at a job, so that others find themselves something else to do.

A lease is a file that only one worker can create; it touches the file every few seconds. One that was not touched for
a while, or whose process is gone from this very machine, is taken over. Correctness never depends on it: whoever works
without one, or keeps working after it was taken, makes the same bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["EXPIRY", "clock", "holder", "is_alive", "leased"]

EXPIRY = 30.0  # seconds without a sign of life


@contextmanager
def leased(folder: Path, key: str, *, expiry: float = EXPIRY) -> Iterator[bool]:
    """True inside if the lease of a job is ours, False if somebody else is at it."""
    path = folder / f"{key}.lease"
    folder.mkdir(parents=True, exist_ok=True)
    if not _take(path, expiry):
        yield False
        return
    _heart.add(path, expiry / 3)
    try:
        yield True
    finally:
        _heart.remove(path)
        if _owner(path) == _us():
            path.unlink(missing_ok=True)


def holder(folder: Path, key: str, *, expiry: float = EXPIRY) -> str | None:
    """In words who is at a job; None where nobody is, or nobody alive."""
    path = folder / f"{key}.lease"
    owner = _owner(path)
    return None if owner is None or _is_over(path, owner, expiry) else f"process {owner[1]} on {owner[0]}"


def _take(path: Path, expiry: float) -> bool:
    for _ in range(3):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not _is_over(path, _owner(path), expiry):
                return False
            path.unlink(missing_ok=True)
            continue
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(_us()))
        return True
    return False


class _Heart:
    """One thread that touches all leases of this process, as often as the most hasty of them wants."""

    def __init__(self) -> None:
        self._leases: dict[Path, float] = {}
        self._changed = threading.Condition()
        self._pace = EXPIRY
        self._beats = False

    def add(self, path: Path, every: float) -> None:
        with self._changed:
            self._leases[path] = every
            if not self._beats:
                self._beats = True
                threading.Thread(target=self._beat, name="orthomerge-leases", daemon=True).start()
            elif every < self._pace:
                self._changed.notify()

    def remove(self, path: Path) -> None:
        with self._changed:
            self._leases.pop(path, None)

    def _beat(self) -> None:
        while True:
            with self._changed:
                self._pace = min(self._leases.values(), default=EXPIRY / 3)
                self._changed.wait(self._pace)
                held = list(self._leases)
            for path in held:
                with suppress(OSError):  # taken over, or the file server is away
                    os.utime(path)


_heart = _Heart()


def _us() -> list[str | int]:
    return [socket.gethostname(), os.getpid()]


def _owner(path: Path) -> list[str | int] | None:
    """Host and process; an empty name and 0 where the file is not filled (yet), None where there is none."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    sound = isinstance(found, list) and len(found) == 2 and isinstance(found[0], str) and isinstance(found[1], int)
    return found if sound else ["", 0]


def _is_over(path: Path, owner: list[str | int] | None, expiry: float) -> bool:
    if owner is None:
        return True
    if owner[0] == socket.gethostname() and not is_alive(int(owner[1])):
        return True
    try:
        return clock(path.parent) - path.stat().st_mtime > expiry
    except OSError:
        return True


def is_alive(pid: int) -> bool:
    """Whether this machine has such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def clock(folder: Path) -> float:
    """The time by the clock that stamps the leases: on a file server it is not that of this machine."""
    probe = folder / f".clock-{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
