"""Store of results: a folder per key, renamed into place when complete, trusted only with a seal of this machine.

An entry is the folder KEY/content and KEY/entry.json: name, seconds, memory, the hash of every file, and a seal over
all of it, an HMAC with a secret that is kept in orthomerge's cache. An entry that was changed, linked or written by
someone else has no valid seal or other hashes; it is ignored and made again. A lease beside the entry keeps two
commands from making it at the same time, and expires when its holder was killed.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from orthomerge.core.errors import CheckpointError, OrthomergeError, OutputError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import build
from orthomerge.files.documents import read_json, write_json
from orthomerge.files.folders import leaves, names_in
from orthomerge.files.publish import publish
from orthomerge.files.raw_file import RawFile
from orthomerge.files.replacing import remove_folder
from orthomerge.models.features import VARIABLE, FeatureCache

ENTRY = "entry.json"
_CONTENT = "content"
_FORMAT = 1
_KEY = re.compile(r"[0-9a-f]{64}")
_LEASE_SECONDS = 30


@dataclass(frozen=True)
class Entry:
    """A stored result. `files`: hashes by name. `memory`: peak memory in bytes."""

    key: str
    name: str
    seconds: float
    memory: int
    files: dict[str, str]
    format: int = _FORMAT


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified = dict[str, Entry]()

    def content(self, key: str) -> Path:
        return self.root / key / _CONTENT

    def get(self, key: str) -> Entry | None:
        """Return an entry if all files are as this machine wrote them, else None; files are hashed once per process."""
        if key not in self._verified:
            entry = self._read(key)
            with suppress(OSError, CheckpointError):
                if entry is not None and entry.files == _hashes(self.root / key):
                    self._verified[key] = entry
        return self._verified.get(key)

    def make(self, key: str, name: str, fill: Callable[[Path], object], *, progress: Progress = SILENT) -> Entry:
        """Return the entry of a key; if there is none, `fill` writes its content into an empty folder."""
        with self._lease(key, progress):
            if (entry := self.get(key)) is not None:
                return entry
            started = time.perf_counter()
            with publish(self.root / key, force=True, marker=ENTRY, unlisted=()) as folder:
                (folder / _CONTENT).mkdir()
                fill(folder / _CONTENT)
                entry = Entry(key, name, time.perf_counter() - started, _peak_memory(), _hashes(folder))
                write_json(folder / ENTRY, {**asdict(entry), "seal": _seal(entry)})
            self._verified[key] = entry
            return entry

    def entries(self) -> Iterator[Entry]:
        """Yield every entry with a valid seal; contents are not checked."""
        for path in sorted(self.root.glob("*")):
            if _KEY.fullmatch(path.name) and (entry := self._read(path.name)) is not None:
                yield entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry, unless its folder has other files."""
        self._verified.pop(entry.key, None)
        with self._lease(entry.key, SILENT):
            place = self.root / entry.key
            if self._read(entry.key) == entry and {*names_in(place)} <= {*entry.files, ENTRY}:
                remove_folder(place, proof=ENTRY)

    def _read(self, key: str) -> Entry | None:
        place = self.root / key
        if place.is_symlink() or (place / ENTRY).is_symlink():
            return None
        try:
            document = read_json(place / ENTRY)
            seal = str(document.pop("seal", ""))
            entry = build(Entry, document, where=ENTRY)
        except OrthomergeError:
            return None
        sealed = hmac.compare_digest(seal.encode(), _seal(entry).encode())
        return entry if sealed and (entry.key, entry.format) == (key, _FORMAT) else None

    @contextmanager
    def _lease(self, key: str, progress: Progress) -> Iterator[None]:
        """Hold the lease of an entry, after waiting for another command that holds it."""
        path = self.root / f".{key}.lease"
        lease = SoftFileLease(str(path), lease_duration=_LEASE_SECONDS, is_singleton=False)
        if self.root.is_symlink():
            raise OutputError(f"{self.root} is a link, and nothing is written through links; move it away")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                lease.acquire(timeout=0)
            except Timeout:
                progress.stage(f"waiting for another command ({path})", None)
                lease.acquire()
        except LeaseSettingsMismatch as error:
            raise OutputError(f"{path} is not a lease of this version of orthomerge; move it away") from error
        except OSError as error:
            raise OutputError(f"cannot write to {self.root}: {error.strerror or error}; give another folder") from error
        try:
            yield
        finally:
            lease.release()


def _hashes(folder: Path) -> dict[str, str]:
    """Hash all files of an entry's content by name; a link has the hash of its target."""
    content, digests, hashes = folder / _CONTENT, dict[str, str](), dict[str, str]()
    if content.is_symlink():
        raise CheckpointError(f"{content} is a link")
    for name in names_in(content):
        path = content / name
        if leaves(path, content):
            raise CheckpointError(f"{path} is a link that leaves its folder")
        real = os.path.realpath(path)
        if real not in digests:
            digests[real] = "folder" if name.endswith("/") else RawFile(path).digest()
        hashes[f"{_CONTENT}/{name}"] = digests[real]
    return hashes


def _seal(entry: Entry) -> str:
    document: Any = json.dumps(asdict(entry), sort_keys=True)
    return hmac.new(_secret(), document.encode(), "sha256").hexdigest()


def _secret() -> bytes:
    """Return the secret of this cache, which is created when it is first needed."""
    path = FeatureCache().folder.parent / "store.key"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent) as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                with suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)
        return path.read_bytes()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; set {VARIABLE} to a writable folder") from error


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
