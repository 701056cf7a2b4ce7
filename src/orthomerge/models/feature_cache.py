"""Features on disk by what made them: the same weights never see the same inputs twice.

An entry is one safetensors file, named by the hash of its key: `values` [n, d] in float32, and `seal`, the hash of key,
shape and values. It is written beside its place and renamed, so an entry is whole or not there, and of two writers the
last wins with the same features. What is read is believed only if header, shape and seal are right; else it is made
again. Labels are not kept: features do not depend on them, so tasks that share inputs share an entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, OutputError
from orthomerge.core.version import VERSION
from orthomerge.files.checkpoint import Spec
from orthomerge.files.documents import parse_json
from orthomerge.files.removal import remove_file
from orthomerge.files.replacing import clear_abandoned, replacing
from orthomerge.files.safetensors import encode_header, read_metadata, read_safetensors
from orthomerge.models.features import Features

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Examples, Labels, Split
    from orthomerge.models.extract import Precision
    from orthomerge.models.processing import Processor


FORMAT = 1
VARIABLE = "ORTHOMERGE_CACHE"
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.partial")
_SEAL = Spec((32,), "U8")


@dataclass(frozen=True)
class FeatureKey:
    """What features depend on, and for whom they are wanted: `task`, `split` and `labels` are not hashed.

    How long texts may be is part of `processor`.
    """

    weights: str
    data: str
    processor: str
    family: str
    pooling: str
    autocast: Precision
    rows: int
    task: str
    split: Split
    labels: Labels | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        examples: Examples,
        processor: Processor,
        *,
        weights: str,
        family: str,
        pooling: str,
        task: str,
        autocast: Precision = "float32",
    ) -> FeatureKey:
        """The key of some examples; `weights`: the digest of the model."""
        content = (weights, examples.digest(), processor.digest(), family, pooling, autocast)
        return cls(*content, rows=len(examples), task=task, split=examples.split, labels=examples.labels)

    @property
    def digest(self) -> str:
        """The name of the entry."""
        return hashlib.sha256(json.dumps(self.content(), sort_keys=True).encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        """What is hashed."""
        asked = ("task", "split", "labels")
        return {"format": FORMAT} | {name: value for name, value in vars(self).items() if name not in asked}


@dataclass(frozen=True)
class Stored:
    """An entry on disk: its name, its bytes, and what its header tells (nothing where it is damaged)."""

    digest: str
    nbytes: int
    about: Mapping[str, Any]


class FeatureCache:
    """Entries in a folder: the one given, else `features` in $ORTHOMERGE_CACHE or in `~/.cache/orthomerge`."""

    def __init__(self, folder: str | Path | None = None) -> None:
        given = Path(folder) if folder is not None else Path(os.environ.get(VARIABLE) or "~/.cache/orthomerge")
        try:
            given = given.expanduser()
        except RuntimeError as error:  # a user without home
            raise OutputError(f"cannot keep features in {given}: {error}; set {VARIABLE} to a folder") from error
        self.folder = given if folder is not None else given / "features"

    def get_or_make(self, key: FeatureKey, make: Callable[[], Features]) -> Features:
        """The features of a key from disk or, if they are not there or not sound, made now and kept."""
        import torch

        digest = key.digest
        values = self._read(digest, key.rows)
        if values is None:
            self._open()
            made = make()
            if (len(made), made.task, made.split) != (key.rows, key.task, key.split):
                raise IncompatibleError(
                    f"features of {key.rows} inputs of {key.task}/{key.split} were to be made, "
                    f"got {len(made)} of {made.task}/{made.split}; key and maker must be of the same examples"
                )
            values = made.values.detach().to("cpu", torch.float32).contiguous()
            self._write(digest, values, key)
        labels = None if key.labels is None else torch.tensor(key.labels, dtype=torch.int64)
        return Features(values, key.task, key.split, labels)

    def entries(self) -> list[Stored]:
        """Everything that is kept, by name."""
        found = []
        for path in self._files(_ENTRY):
            with suppress(OSError):  # cleared away meanwhile
                found.append(Stored(path.stem, path.stat().st_size, _about(path)))
        return found

    @property
    def nbytes(self) -> int:
        """How much room the entries take."""
        return sum(entry.nbytes for entry in self.entries())

    def clear(self) -> int:
        """Remove all entries, and what killed writers left; the number of bytes that became free."""
        return sum(_remove(path) for pattern in (_ENTRY, _PARTIAL) for path in self._files(pattern))

    def _files(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        """Files of ours; whatever else lies in the folder is not touched."""
        try:
            paths = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise OutputError(f"cannot look into {self.folder}: {error.strerror}; set {VARIABLE} elsewhere") from error
        yield from (path for path in paths if pattern.fullmatch(path.name))

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    def _read(self, digest: str, rows: int) -> torch.Tensor | None:
        try:
            entries = read_safetensors(self._path(digest))
            specs = {name: entry.spec for name, entry in entries.items()}
            shape = specs["values"].shape if "values" in specs else ()
            if len(shape) != 2 or shape[0] != rows or specs != {"values": Spec(shape, "F32"), "seal": _SEAL}:
                return None
            values = entries["values"].read(0, specs["values"].numel).reshape(shape)
            seal = entries["seal"].read(0, _SEAL.numel)
        except CheckpointError:  # not there, or damaged: either way it must be made
            return None
        return values if bytes(seal.tolist()) == _seal(digest, values) else None

    def _open(self) -> None:
        """Make sure, before anything is computed, that it can be kept."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(0, "no permission")
        except OSError as error:
            raise OutputError(
                f"cannot keep features in {self.folder}: {error.strerror}; set {VARIABLE} to a folder that can be "
                "written to"
            ) from error
        for path in self._files(_PARTIAL):
            clear_abandoned(path)

    def _write(self, digest: str, values: torch.Tensor, key: FeatureKey) -> None:
        seal = _seal(digest, values)
        about = {"task": key.task, "split": key.split, "width": values.shape[1], **key.content()}
        about |= {"orthomerge": VERSION, "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        specs = {"values": Spec(tuple(values.shape), "F32"), "seal": _SEAL}
        header = encode_header(specs, {"features": json.dumps(about, sort_keys=True)})
        try:
            with replacing(self._path(digest), f".{digest}") as file:
                for piece in (header, values.numpy().data, seal):
                    file.write(piece)
        except OSError as error:
            raise OutputError(
                f"cannot keep features in {self.folder}: {error.strerror}; make room, or set {VARIABLE} elsewhere"
            ) from error


def _seal(digest: str, values: torch.Tensor) -> bytes:
    sha = hashlib.sha256(f"{digest} {tuple(values.shape)}:".encode())
    sha.update(values.numpy().data)
    return sha.digest()


def _about(path: Path) -> dict[str, Any]:
    try:
        return parse_json(read_metadata(path).get("features", "").encode(), str(path))
    except CheckpointError:
        return {}


def _remove(path: Path) -> int:
    try:
        size = path.stat().st_size
        remove_file(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise OutputError(f"cannot remove {path}: {error.strerror}; remove it yourself") from error
    return size
