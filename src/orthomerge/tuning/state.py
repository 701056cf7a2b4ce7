"""Where an unfinished run stands, so that a killed one goes on from its last epoch to the same result.

Kept in a hidden folder beside the output, which has a marker of ours, and removed with success; of a folder without the
marker nothing is read, replaced or removed. Only tensors, numbers and text are stored, and read back as such; a file of
another run, or one that was cut short, counts as none: the run then starts from its beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.core.errors import OutputError
from orthomerge.core.version import VERSION
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.ownership import STATE, names_in
from orthomerge.files.removal import remove_tree, remove_working
from orthomerge.files.replacing import clear_partials, replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from orthomerge.data.task import Examples, Task
    from orthomerge.models.heads import Head
    from orthomerge.models.processing import Processor
    from orthomerge.tuning.settings import Tuning


def state_folder(out: Path) -> Path:
    """The hidden folder beside an expert that is being trained."""
    return _beside(out, "tuning")


def fit_state_folder(out: Path) -> Path:
    """The hidden folder beside a merge that is being fitted."""
    return _beside(out, "fitting")


def _beside(out: Path, what: str) -> Path:
    out = Path(os.path.abspath(out.expanduser()))
    return out.parent / f".{out.name}.{what}"


def clear_state(folder: Path) -> None:
    """Remove what was kept for an output that is now complete."""
    RunState(folder, "").remove()


# What torch raises for a file that was cut short, or that something else wrote.
_UNREADABLE = (
    AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError, TypeError, UnpicklingError, ValueError,
    struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class RunState:
    """The state of the run that `fingerprint` identifies. `part`: of what, where a run keeps several."""

    folder: Path
    fingerprint: str
    part: str = ""

    def write(self, state: dict[str, Any]) -> None:
        """Replace what is there, in one step."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check()
            (self.folder / STATE).touch()
            self._file.parent.mkdir(exist_ok=True)
            clear_partials(self._file.parent, ".state")
            with replacing(self._file, ".state") as file:
                torch.save({"fingerprint": self.fingerprint, **state}, file)
        except (OSError, RuntimeError) as error:  # torch may make the one of the other
            why = getattr(error, "strerror", None) or error
            raise OutputError(f"cannot keep the state of the run in {self.folder}: {why}; make room there") from error

    def read(self) -> dict[str, Any] | None:
        """The state, if there is one of this very run."""
        self._check()
        if not self._is_ours() or not self._file.is_file():
            return None
        try:
            state = torch.load(self._file, map_location="cpu", weights_only=True)
        except _UNREADABLE:
            return None
        return state if isinstance(state, dict) and state.get("fingerprint") == self.fingerprint else None

    def remove(self) -> None:
        """Begin from the beginning the next time."""
        if not self._is_ours():
            return
        with suppress(OSError):
            if self.part:
                remove_tree(self._file.parent, proof=STATE)
            else:
                remove_working(self.folder, proof=STATE)

    def _check(self) -> None:
        """Refuse a folder with files of somebody else."""
        if not self._is_ours() and os.path.lexists(self.folder) and next(names_in(self.folder), None) is not None:
            raise OutputError(f"{self.folder} is where the state of the run is kept, and is not ours; move it away")

    def _is_ours(self) -> bool:
        marker = self.folder / STATE
        return marker.is_file() and not marker.is_symlink() and not self.folder.is_symlink()

    @property
    def _file(self) -> Path:
        return self.folder / self.part / "state.pt"


def fingerprint(
    tasks: Iterable[Task],
    *,
    base: Path,
    settings: Tuning,
    processor: Processor,
    family: str,
    others: Sequence[Examples],
    head: Head | None,
) -> str:
    """A hash of everything that the result depends on."""
    known: dict[str, Any] = {
        "version": [VERSION, torch.__version__],
        "settings": asdict(settings),
        "family": family,
        "processor": processor.digest(),
        "base": [file.digest() for file in open_checkpoint(base).files],
        "tasks": [
            [task.name, task.labels, *([name, task[name].digest(), _labels(task[name])] for name in _used(task))]
            for task in tasks
        ],
        "others": [part.digest() for part in others],
        "head": None if head is None else {name: _bytes(tensor) for name, tensor in head.tensors().items()},
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _used(task: Task) -> list[str]:
    return [name for name in ("train", "val") if name in task.splits]


def _labels(examples: Examples) -> str | None:
    return None if examples.labels is None else hashlib.sha256(examples.labels.tobytes()).hexdigest()


def _bytes(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
