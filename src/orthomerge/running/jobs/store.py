"""Where jobs leave what they made, so that a job is done once, whole, and by anybody.

RUN/jobs/KEY/              the files of a job, there in one step
RUN/jobs/KEY.done          that it is done: hash of every file, seconds, memory, who did it
RUN/jobs/KEY.UNIQUE.tmp/   being filled by somebody, or left by a killed worker
RUN/jobs/KEY.lease         who is at it (`leases.py`): saves work, and nothing depends on it
RUN/jobs/KEY.failed        why it failed the last time, for those who wait for it

Two workers on one job make the same bytes; the second one to finish throws its own away.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from orthomerge.checkpoints.replacing import replacing, sync
from orthomerge.errors import OrthomergeError, OutputError
from orthomerge.running.info import peak_memory
from orthomerge.running.jobs.leases import holder, is_alive
from orthomerge.strict import build

__all__ = ["FOLDER", "Done", "Row", "Store"]

FOLDER = "jobs"
_FORMAT = 1
_STEP = 1 << 20
_OURS = re.compile(
    r"([0-9a-f]{64})(\.done|\.lease|\.failed|\.fit|\.(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+\.tmp|\..+\.(old|partial))?"
)


@dataclass(frozen=True)
class Row:
    """A file of a job; `modified` in nanoseconds: while it and the size are the same, the hash is believed."""

    size: int
    modified: int
    sha256: str


@dataclass(frozen=True)
class Done:
    """A job that is done. `memory`: bytes at the peak of its process so far."""

    key: str
    kind: str
    files: dict[str, Row]
    seconds: float
    memory: int
    host: str
    pid: int
    format: int = _FORMAT


@dataclass(frozen=True)
class Store:
    """The jobs of one run folder."""

    run: Path

    @property
    def folder(self) -> Path:
        return self.run / FOLDER

    def place(self, key: str) -> Path:
        """The files of a job."""
        return self.folder / key

    def is_marked(self, key: str) -> bool:
        """Whether somebody said that a job is done; a cheap look, for whoever waits."""
        return (self.folder / f"{key}.done").is_file()

    def marked(self) -> set[str]:
        """Keys of all jobs that somebody said are done."""
        return {path.stem for path in self.folder.glob("*.done")}

    def fail(self, key: str, told: tuple[str, str]) -> None:
        """Tell those who wait for a job that it failed, with the error's class and message."""
        with suppress(OSError):
            (self.folder / f"{key}.failed").write_text(json.dumps(told))

    def failure(self, key: str, *, since: float) -> tuple[str, str] | None:
        """How a job failed after a time by the clock of the folder; None if it did not."""
        path = self.folder / f"{key}.failed"
        try:
            if path.stat().st_mtime < since:
                return None
            kind, message = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return str(kind), str(message)

    def found(self, key: str) -> Done | None:
        """What a job made, if it is done and all its files are what they were."""
        try:
            document = json.loads((self.folder / f"{key}.done").read_text(encoding="utf-8"))
            done = build(Done, document, where=key)
            sound = done.key == key and done.format == _FORMAT
            return done if sound and all(self._same(key, *item) for item in done.files.items()) else None
        except (OSError, ValueError, OrthomergeError):
            return None

    def make(self, key: str, kind: str, fill: Callable[[Path], None], *, needs: Iterable[str] = ()) -> Done:
        """Let a job fill a folder and put it in its place; if another was faster, theirs stays.

        Files that are hard links to those of `needs` are not hashed again.
        """
        us = f"{socket.gethostname()}-{os.getpid()}"
        partial = self.folder / f"{key}.{us}-{secrets.token_hex(4)}.tmp"
        started = time.perf_counter()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
            fill(partial)
            files = self._table(partial, self._known(needs))
            seconds = time.perf_counter() - started
            done = Done(key, kind, files, seconds, peak_memory(), socket.gethostname(), os.getpid())
            return self._commit(partial, done)
        except OSError as error:
            raise OutputError(f"cannot write {partial}: {error.strerror or error}; make room, and go on") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def keep(self, keys: Iterable[str]) -> None:
        """Remove what belongs to no job of a plan, and what killed workers of this machine left of others."""
        wanted = set(keys)
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            match = _OURS.fullmatch(path.name)
            if match is None or (match[1] in wanted and not self._is_left(match)):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _is_left(self, match: re.Match[str]) -> bool:
        """Whether it is a lease of nobody, or what a process of this machine was filling before it died."""
        if match[2] == ".lease":
            return holder(self.folder, match[1]) is None
        return match["host"] == socket.gethostname() and not is_alive(int(match["pid"]))

    def _same(self, key: str, name: str, row: Row) -> bool:
        path = self.place(key) / name
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) == (row.size, row.modified):
            return True
        return status.st_size == row.size and _sha256(path) == row.sha256

    def _known(self, needs: Iterable[str]) -> dict[tuple[int, int], str]:
        """Hashes of the files of other jobs, by device and inode."""
        table = {}
        for key in needs:
            for name, row in (done.files if (done := self.found(key)) else {}).items():
                status = (self.place(key) / name).stat()
                table[status.st_dev, status.st_ino] = row.sha256
        return table

    def _table(self, folder: Path, known: dict[tuple[int, int], str]) -> dict[str, Row]:
        """Every file of a folder, on disk when this returns."""
        rows: dict[str, Row] = {}
        for path in sorted(folder.rglob("*")):
            sync(path)
            if path.is_file():
                status = path.stat()
                digest = known.get((status.st_dev, status.st_ino)) or _sha256(path)
                rows[path.relative_to(folder).as_posix()] = Row(status.st_size, status.st_mtime_ns, digest)
        sync(folder)
        return rows

    def _commit(self, partial: Path, done: Done) -> Done:
        place = self.place(done.key)
        while True:
            try:
                partial.rename(place)
                break
            except OSError:
                if not place.is_dir():
                    raise
            if (theirs := self.found(done.key)) is not None:
                return theirs
            if (table := self._looked(place)) is not None and _hashes(table) == _hashes(done.files):
                done = Done(**{**vars(done), "files": table})  # the other was killed before it could say so
                break
            old = place.with_name(f"{done.key}.{secrets.token_hex(4)}.old")
            with suppress(FileNotFoundError):  # somebody else put it aside
                place.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        (self.folder / f"{done.key}.failed").unlink(missing_ok=True)
        path = self.folder / f"{done.key}.done"  # its name and that of the folder are synced together
        with replacing(path, path.name) as file:
            file.write((json.dumps(asdict(done), ensure_ascii=False) + "\n").encode())
        return done

    def _looked(self, place: Path) -> dict[str, Row] | None:
        try:
            return self._table(place, {})
        except OSError:  # put aside meanwhile
            return None


def _hashes(table: dict[str, Row]) -> dict[str, str]:
    return {name: row.sha256 for name, row in table.items()}


def _sha256(path: Path) -> str:
    running = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_STEP):
            running.update(piece)
    return running.hexdigest()
