"""State of an unfinished run, from which a killed run continues to the same result.

It is kept in a hidden folder beside the output. Without our marker, nothing in the folder is read, replaced or removed.
Only tensors, numbers and text are stored. A truncated file, or that of another run, is ignored.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orthomerge.core.errors import OutputError
from orthomerge.files.folders import STATE, names_in
from orthomerge.files.replacing import remove_folder, replacing

_FILE = "state.pt"


def state_folder(out: Path, what: str) -> Path:
    """Return the hidden folder beside an output; `what` is the kind of run, "tuning" or "fitting"."""
    out = Path(os.path.abspath(out.expanduser()))
    return out.parent / f".{out.name}.{what}"


def clear_state(folder: Path) -> None:
    """Remove the state of a run that is complete, or that must start from its beginning."""
    with suppress(OSError):
        if not folder.is_symlink():
            remove_folder(folder, proof=STATE)


@dataclass(frozen=True)
class RunState:
    """State of the run with a `fingerprint`; `part` distinguishes several states of one run."""

    folder: Path
    fingerprint: str
    part: str = ""

    def write(self, state: dict[str, Any]) -> None:
        path = self.folder / self.part / _FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check()
            (self.folder / STATE).touch()
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as file:
                torch.save({"fingerprint": self.fingerprint, **state}, file)
        except (OSError, RuntimeError) as error:  # torch reports some disk errors as RuntimeError
            why = getattr(error, "strerror", None) or error
            raise OutputError(f"cannot keep the state of the run in {self.folder}: {why}; make room there") from error

    def read(self) -> dict[str, Any] | None:
        self._check()
        if not self._has_marker():
            return None
        try:
            state = torch.load(self.folder / self.part / _FILE, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - a truncated file, or one of another program: each has errors of its own
            return None
        return state if isinstance(state, dict) and state.get("fingerprint") == self.fingerprint else None

    def _check(self) -> None:
        if not self._has_marker() and os.path.lexists(self.folder) and next(names_in(self.folder), None) is not None:
            raise OutputError(f"{self.folder} is needed for the state of the run, but has other files; move it away")

    def _has_marker(self) -> bool:
        marker = self.folder / STATE
        return marker.is_file() and not marker.is_symlink() and not self.folder.is_symlink()
