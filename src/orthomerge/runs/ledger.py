"""What of a run is done: for every stage the hash of its inputs, the files it wrote, and what it cost.

RUN/stages.json says it. A stage counts as done only if its inputs are the same and its files are what they were. A file
that is damaged or of another version counts as none: everything is then done again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.core.schema import build
from orthomerge.evaluation.records import write_whole
from orthomerge.files.removal import remove_listed
from orthomerge.files.run_folder import RUN, claim
from orthomerge.runs.digests import Digests

FILE = "stages.json"
_FORMAT = 1
_LOCK = ".lock"


@dataclass(frozen=True)
class Entry:
    """A stage that is done. `files`: hashes by path from the run folder; `memory`: bytes at the peak so far."""

    key: str
    files: dict[str, str]
    seconds: float
    memory: int


@dataclass(frozen=True)
class _Document:
    format: int = _FORMAT
    stages: dict[str, Entry] = field(default_factory=dict)
    digests: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ledger:
    """The stages of one run folder."""

    run: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    digests: Digests = field(default_factory=Digests)

    def has(self, name: str, key: str) -> bool:
        """Whether a stage was done with these inputs, and all that it wrote is as it was."""
        entry = self.entries.get(name)
        return entry is not None and entry.key == key and self.digests.same(entry.files, within=self.run)

    def owns(self, folder: Path) -> bool:
        """Whether a stage of this run wrote something in a folder."""
        start = self.relative(folder) + "/"
        return any(name.startswith(start) for entry in self.entries.values() for name in entry.files)

    def add(self, name: str, key: str, files: Mapping[Path, str], *, seconds: float, memory: int) -> None:
        """Write down that a stage is done."""
        self.digests.note(files)
        table = {self.relative(path): digest for path, digest in files.items()}
        self.entries[name] = Entry(key, table, seconds, memory)
        self.write()

    def begin(self, name: str) -> None:
        """A stage that is about to be done again is not done; what it wrote is still ours."""
        if name in self.entries:
            self.entries[name] = replace(self.entries[name], key="")
            self.write()

    def keep(self, names: Collection[str], *, models: str) -> None:
        """Forget stages that the recipe does not have any more, and remove what they wrote beside models."""
        for name in [name for name in self.entries if name not in names]:
            files = self.entries.pop(name).files
            remove_listed(self.run, [file for file in files if not file.startswith(models)])
            self.write()

    def relative(self, path: Path) -> str:
        """A path as the ledger has it."""
        return Path(os.path.relpath(os.path.abspath(path), os.path.abspath(self.run))).as_posix()

    def write(self) -> None:
        """Whole or not at all."""
        digests = {path: tuple(known) for path, known in self.digests.known.items()}
        document = asdict(_Document(stages=self.entries, digests=digests))
        write_whole(self.run / FILE, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def open_ledger(run: Path, *, force: bool = False, kind: str | None = None) -> Iterator[Ledger]:
    """The run folder, made if need be, and locked: two runs in one folder would undo each other's work.

    A folder with other things in it is not taken for a run's, unless `force`, and a run of another `kind` never.
    """
    try:
        held = run.is_dir() and any(path.name not in (_LOCK, RUN) for path in run.iterdir())
        if held and not (run / FILE).is_file() and not force:
            raise OutputError(
                f"{run} is not empty and was not made by `orthomerge run` (it has no {FILE}); give another --run, or "
                "--force to write into it"
            )
        run.mkdir(parents=True, exist_ok=True)
        lock = os.open(run / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise OutputError(f"cannot write the run to {run}: {error.strerror}; give another --run") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"another run is at work in {run}; wait for it, or give another --run") from error
        claim(run, [FILE], kind=kind)
        yield _read(run)
    finally:
        os.close(lock)


def _read(run: Path) -> Ledger:
    with suppress(OSError, ValueError, OrthomergeError):
        document = build(_Document, json.loads((run / FILE).read_text(encoding="utf-8")), where=FILE)
        sound = all(len(known) == 2 for known in document.digests.values())
        if document.format == _FORMAT and sound:
            known = {path: list(pair) for path, pair in document.digests.items()}
            return Ledger(run, dict(document.stages), Digests(known))
    return Ledger(run)
