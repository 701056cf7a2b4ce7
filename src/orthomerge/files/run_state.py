"""State of an unfinished run, from which a killed run continues to the same result.

The state lies in a hidden folder beside the output, under a marker file, and is removed with success; in a folder
without the marker nothing is read, replaced or removed. Only tensors, numbers and text are stored and read; a file of
another run, or one that was cut short, counts as none: the run then starts from its beginning.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from orthomerge.core.errors import OutputError
from orthomerge.files.folders import STATE, names_in
from orthomerge.files.replacing import remove_folder, remove_listed, replacing

# What torch raises for a file that was cut short, or that another program wrote.
_UNREADABLE = (
    AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError, TypeError, UnpicklingError, ValueError,
    struct.error,
)  # fmt: skip
_FILE = "state.pt"


def state_folder(out: Path, what: str) -> Path:
    """The hidden folder beside an output; `what`: of which kind of run, "tuning" or "fitting"."""
    out = Path(os.path.abspath(out.expanduser()))
    return out.parent / f".{out.name}.{what}"


def clear_state(folder: Path) -> None:
    """Remove the state of a run whose output is complete."""
    RunState(folder, "").remove()


@dataclass(frozen=True)
class RunState:
    """The state of the run that `fingerprint` identifies. `part`: of which part, where a run keeps several states."""

    folder: Path
    fingerprint: str
    part: str = ""

    def write(self, state: dict[str, Any]) -> None:
        """Replace the state on disk in one step."""
        path = self.folder / self.part / _FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check()
            (self.folder / STATE).touch()
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as file:
                torch.save({"fingerprint": self.fingerprint, **state}, file)
        except (OSError, RuntimeError) as error:  # torch may turn the one into the other
            why = getattr(error, "strerror", None) or error
            raise OutputError(f"cannot keep the state of the run in {self.folder}: {why}; make room there") from error

    def read(self) -> dict[str, Any] | None:
        """Return the state of this run, or None."""
        self._check()
        if not self._is_ours():
            return None
        try:
            state = torch.load(self.folder / self.part / _FILE, map_location="cpu", weights_only=True)
        except _UNREADABLE:
            return None
        return state if isinstance(state, dict) and state.get("fingerprint") == self.fingerprint else None

    def remove(self) -> None:
        """Remove the state: the run is complete, or must start from its beginning."""
        with suppress(OSError):
            if self._is_ours() and self.part:
                remove_listed(self.folder, [f"{self.part}/{_FILE}"])
            elif self._is_ours():
                remove_folder(self.folder, proof=STATE)

    def _check(self) -> None:
        """Refuse a folder with other files."""
        if not self._is_ours() and os.path.lexists(self.folder) and next(names_in(self.folder), None) is not None:
            raise OutputError(f"{self.folder} is where the state of the run is kept, and is not ours; move it away")

    def _is_ours(self) -> bool:
        marker = self.folder / STATE
        return marker.is_file() and not marker.is_symlink() and not self.folder.is_symlink()
