"""How one process's failure becomes the failure of all: a note in torchrun's store, which everybody looks for.

Whoever fails leaves a note and cuts its connections, so that nobody waits for it. The first process then ends with the
message and the exit code of the note, in order, as if the error were its own; the others have nothing to clear up and
end at once with the same code.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orthomerge.errors import OrthomergeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Failures", "Note"]

_POLL = 0.2  # seconds between two looks at the store
_PATIENCE = 2.0  # in which the first process is expected to come across a note by itself
_LONGEST = 15.0  # after which a process that cannot be reached is ended where it stands
_LOST = (
    "another process of this run was lost: it was killed, or its machine went away; run the same command again to go "
    "on from the last state, or let `torchrun --max-restarts` do so"
)


@dataclass(frozen=True)
class Note:
    """Who failed, how, and what everybody is to exit with."""

    rank: int
    message: str
    code: int


class Failures:
    """`connect` opens the store anew, for each thread that talks to it. `raised`: what was found is on its way up."""

    def __init__(self, rank: int, world: int, connect: Callable[[], Any]) -> None:
        self._rank, self._world, self._store, self._connect = rank, world, connect(), connect
        self.raised = self._told = self._stopped = self._lost = False
        self._main = threading.main_thread().ident

    def watch(self) -> None:
        """Look for notes from now on."""
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """All went well: look no further."""
        self._stopped = True

    def tell(self, message: str, code: int) -> Note:
        """Leave a note, unless somebody was faster; gives the note that counts."""
        self._told = True
        text = json.dumps(asdict(Note(self._rank, message, code)))
        return _note(self._store.compare_set("failure", "", text))

    def found(self, broken: str = "") -> OrthomergeError:
        """What to raise where a connection broke: the note that explains it, for which it waits a while.

        Without one a process was lost, and how the connection was `broken` is all that is known.
        """
        self.raised = True
        end = time.monotonic() + _PATIENCE
        while not self._store.check(["failure"]):
            if time.monotonic() > end:
                self._lost = True
                return OrthomergeError(f"{_LOST} ({broken})" if broken else _LOST)
            time.sleep(_POLL / 4)
        return _error(_note(self._store.get("failure")))

    def note(self) -> Note | None:
        """The note that was left, if any."""
        return _note(self._store.get("failure")) if self._store.check(["failure"]) else None

    def was_heard(self) -> bool:
        """Whether the first process knows, and so will tell the user. Nobody waits long: it needs this one to end."""
        return self._wait(["heard"], 2 * _PATIENCE)

    def gone(self) -> None:
        """Say that this process is about to exit."""
        self._store.set(f"gone/{self._rank}", "yes")

    def all_gone(self) -> bool:
        """Wait for the others to go, so that they go with the code of the note, and not killed by torchrun."""
        return self._lost or self._wait([f"gone/{rank}" for rank in range(1, self._world)], _LONGEST)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while keys and not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL / 4)
        return True

    def _watch(self) -> None:
        store = self._connect()
        try:
            while not store.check(["failure"]):
                time.sleep(_POLL)
                if self._stopped:
                    return
            note = _note(store.get("failure"))
            if not self._rank:
                store.set("heard", "yes")
        except RuntimeError:  # torchrun itself has gone
            if self._rank and not self._stopped:
                os._exit(1)
            return
        if self._stopped or self._told:
            return
        if self._rank:
            store.set(f"gone/{self._rank}", "yes")
            os._exit(note.code)
        self._interrupt(note)

    def _interrupt(self, note: Note) -> None:
        """Make the first process fail where it stands, if it does not find out by itself."""
        time.sleep(_PATIENCE)
        if self.raised or self._told:
            return
        kind = type("PeerError", (OrthomergeError,), {"exit_code": note.code, "__str__": lambda _: _text(note)})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), ctypes.py_object(kind))
        time.sleep(_LONGEST)
        if not self._told:
            sys.stderr.write(f"orthomerge: {_text(note)}\n")
            sys.stderr.flush()
            os._exit(note.code)


def _note(data: bytes) -> Note:
    return Note(**json.loads(data))


def _error(note: Note) -> OrthomergeError:
    found = OrthomergeError(_text(note))
    found.exit_code = note.code  # of the class that it had there
    return found


def _text(note: Note) -> str:
    return note.message if note.rank == 0 else f"process {note.rank}: {note.message}"
