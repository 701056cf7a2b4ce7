"""Where an unfinished run stands, so that a killed one goes on from its last epoch to the same result.

Kept in a hidden folder beside the output and removed with success. Only tensors, numbers and text are stored, and read
back as such; a file of another run, or one that was cut short, counts as none: the run then starts from its beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.checkpoints.replacing import clear_abandoned, replacing
from orthomerge.errors import OutputError
from orthomerge.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Examples, Task
    from orthomerge.heads import Head
    from orthomerge.tuning.settings import Tuning

__all__ = ["RunState", "clear_state", "fingerprint", "state_folder"]


def state_folder(out: Path) -> Path:
    """The hidden folder beside an output."""
    out = Path(os.path.abspath(out.expanduser()))
    return out.parent / f".{out.name}.tuning"


def clear_state(out: Path) -> None:
    """Remove what was kept for an output that is now complete."""
    shutil.rmtree(state_folder(out), ignore_errors=True)


@dataclass(frozen=True)
class RunState:
    """The state of the run that `fingerprint` identifies."""

    folder: Path
    fingerprint: str

    def write(self, state: dict[str, Any]) -> None:
        """Replace what is there, in one step."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".state.*.partial"):
                clear_abandoned(left)
            with replacing(self._file, ".state") as file:
                torch.save({"fingerprint": self.fingerprint, **state}, file)
        except (OSError, RuntimeError) as error:  # torch may make the one of the other
            why = getattr(error, "strerror", None) or error
            raise OutputError(f"cannot keep the state of the run in {self.folder}: {why}; make room there") from error

    def read(self) -> dict[str, Any] | None:
        """The state, if there is one of this very run."""
        if not self._file.is_file():
            return None
        try:
            state = torch.load(self._file, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError, KeyError, ValueError):  # cut short, or not ours
            return None
        return state if isinstance(state, dict) and state.get("fingerprint") == self.fingerprint else None

    def remove(self) -> None:
        """Begin from the beginning the next time."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _file(self) -> Path:
        return self.folder / "state.pt"


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
