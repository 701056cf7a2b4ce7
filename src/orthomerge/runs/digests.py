"""What identifies inputs and outputs of a stage: hashes of contents, each read once as long as nobody touches it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError
from orthomerge.files.paths import RawFile
from orthomerge.models.manifest import read_manifest
from orthomerge.models.processors import COMPANIONS
from orthomerge.models.writing import README

if TYPE_CHECKING:
    from orthomerge.data.task import Task
    from orthomerge.files.checkpoint import Checkpoint
    from orthomerge.files.lora import Adapter


# Beside the weights, what a merge reads of a checkpoint.
_DOCUMENTS = ("config.json", "adapter_config.json", README, *COMPANIONS)


def digest_of(document: Any) -> str:
    """Of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def output_files(folder: Path) -> dict[Path, str]:
    """Every file of an output with its hash, as the manifest has them; the card may be written anew and is left out."""
    files = read_manifest(folder)["files"]
    return {folder / name: facts["hash"] for name, facts in files.items() if name != README}


@dataclass(frozen=True)
class Digests:
    """Hashes by path, believed while the file has the same size, times and inode.

    A file's time of change cannot be set back, so a stamp is not the same after any write. `known`: path to stamp and
    hash, plain data.
    """

    known: dict[str, list[str]] = field(default_factory=dict)

    def file(self, path: Path) -> str:
        """Of one file."""
        return self._of(path, _stamp(path), lambda: RawFile(path).digest())

    def note(self, files: Mapping[Path, str]) -> None:
        """Hashes of files that were written just now and need not be read again."""
        self.known.update({os.path.abspath(path): [_stamp(path), digest] for path, digest in files.items()})

    def source(self, source: str | Task) -> str:
        """Of a task's data: a file, a folder with all below it, a task in memory; of a dataset of the hub, its name."""
        if not isinstance(source, str):
            labels = {split: None if part.labels is None else part.labels.tolist() for split, part in _parts(source)}
            return digest_of([source.labels, labels, {split: part.digest() for split, part in _parts(source)}])
        path = Path(source).expanduser()
        if path.is_file():
            return self.file(path)
        return self._tree(path) if path.is_dir() else source

    def checkpoint(self, opened: Checkpoint | Adapter) -> str:
        """Of a model, adapter or file of weights, with the documents beside it."""
        path = opened.path
        beside = [path / name for name in _DOCUMENTS if path.is_dir() and (path / name).is_file()]
        files = [*(file.path for file in opened.files), *beside]
        return digest_of([path.name, opened.revision, *((file.name, self.file(file)) for file in files)])

    def same(self, files: Mapping[str, str], *, within: Path) -> bool:
        """Whether all files are there and are what they were."""
        try:
            return all(self.file(within / name) == digest for name, digest in files.items())
        except (OSError, CheckpointError):
            return False

    def _tree(self, folder: Path) -> str:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        stamp = digest_of([(path.relative_to(folder).as_posix(), _stamp(path)) for path in paths])
        return self._of(folder, stamp, lambda: digest_of(_contents(folder, paths)))

    def _of(self, path: Path, stamp: str, make: Callable[[], str]) -> str:
        place = os.path.abspath(path)
        if place not in self.known or self.known[place][0] != stamp:
            self.known[place] = [stamp, make()]
        return self.known[place][1]


def _contents(folder: Path, paths: Iterable[Path]) -> list[tuple[str, str]]:
    return [(path.relative_to(folder).as_posix(), RawFile(path).digest()) for path in paths]


def _parts(task: Task) -> list[tuple[str, Any]]:
    return sorted(task.splits.items())


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
