"""What an encoder makes of inputs, and features on disk by what made them, so that nothing is computed twice.

An entry of the cache is one safetensors file, named by the hash of its key: `values` [n, d] in float32, and `seal`, the
hash of key, shape and values. It is written beside its place and renamed, so an entry is whole or not there, and of two
writers the last wins with the same features. What is read is used only if header, shape and seal are right; else it is
computed again. Features do not depend on labels, so tasks that share inputs share an entry.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.core.errors import CheckpointError, IncompatibleError, OutputError
from orthomerge.core.version import VERSION
from orthomerge.files.checkpoint import Spec
from orthomerge.files.replacing import clear_partials, replacing
from orthomerge.files.safetensors import encode_header, read_safetensors

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Examples, Split
    from orthomerge.models.processing import Processor


FORMAT = 1
VARIABLE = "ORTHOMERGE_CACHE"
_SEAL = Spec((32,), "U8")
# What the encoder computes in; float32: as its weights are, without autocast.
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Features:
    """Features [n, d] in float32 on the CPU, in the order of the inputs; labels [n] (int64) where they are known."""

    values: torch.Tensor
    task: str
    split: Split
    labels: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise IncompatibleError(f"features must be [n, d], got {tuple(self.values.shape)}")
        if self.labels is not None and len(self.labels) != len(self.values):
            raise IncompatibleError(f"{len(self.values)} features but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, values: torch.Tensor, examples: Examples, task: str) -> Features:
        """Features of some examples, with their labels."""
        import torch

        labels = None if examples.labels is None else torch.tensor(examples.labels, dtype=torch.int64)
        return cls(values, task, examples.split, labels)

    def take(self, places: torch.Tensor) -> Features:
        """Some rows, in the order given."""
        labels = None if self.labels is None else self.labels[places]
        return Features(self.values[places], self.task, self.split, labels)

    def unlabelled(self) -> Features:
        """The same without labels."""
        return Features(self.values, self.task, self.split)


@dataclass(frozen=True)
class FeaturePair:
    """The same inputs seen by the merged encoder and by the expert."""

    merged: Features
    expert: Features

    def __post_init__(self) -> None:
        one, other = self.merged, self.expert
        if (len(one), one.task, one.split) != (len(other), other.task, other.split):
            raise IncompatibleError(
                f"a pair must hold the same inputs: {len(one)} of {one.task}/{one.split}, "
                f"{len(other)} of {other.task}/{other.split}"
            )


@dataclass(frozen=True)
class FeatureKey:
    """What features depend on, as digests and names; `processor` includes how long texts may be."""

    weights: str
    data: str
    processor: str
    family: str
    pooling: str
    autocast: Precision
    rows: int

    @classmethod
    def of(
        cls,
        examples: Examples,
        processor: Processor,
        *,
        weights: str,
        family: str,
        pooling: str,
        autocast: Precision = "float32",
    ) -> FeatureKey:
        """The key of some examples; `weights`: the digest of the model."""
        return cls(weights, examples.digest(), processor.digest(), family, pooling, autocast, len(examples))

    @property
    def content(self) -> dict[str, Any]:
        """What is hashed."""
        return {"format": FORMAT, **asdict(self)}

    @property
    def digest(self) -> str:
        """The name of the entry."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()


class FeatureCache:
    """Entries in a folder: the one given, else `features` in $ORTHOMERGE_CACHE or in `~/.cache/orthomerge`."""

    def __init__(self, folder: str | Path | None = None) -> None:
        root = Path(folder) if folder is not None else Path(os.environ.get(VARIABLE) or "~/.cache/orthomerge")
        try:
            root = root.expanduser()
        except RuntimeError as error:  # a user without home
            raise OutputError(f"cannot keep features in {root}: {error}; set {VARIABLE} to a folder") from error
        self.folder = root if folder is not None else root / "features"

    def get_or_make(self, key: FeatureKey, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The features [n, d] of a key from disk or, if they are not there or not sound, computed now and kept."""
        import torch

        digest = key.digest
        values = self._read(digest, key.rows)
        if values is None:
            self._open()
            values = compute().detach().to("cpu", torch.float32).contiguous()
            if len(values) != key.rows:
                raise IncompatibleError(f"features of {key.rows} inputs were to be computed, got {len(values)}")
            self._write(key, values)
        return values

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
        """Make sure, before anything is computed, that it can be kept; remove what killed writers left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(0, "no permission")
        except OSError as error:
            raise OutputError(
                f"cannot keep features in {self.folder}: {error.strerror}; set {VARIABLE} to a folder that can be "
                "written to"
            ) from error
        clear_partials(self.folder)

    def _write(self, key: FeatureKey, values: torch.Tensor) -> None:
        digest = key.digest
        seal = _seal(digest, values)
        about = {**key.content, "orthomerge": VERSION, "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        specs = {"values": Spec(tuple(values.shape), "F32"), "seal": _SEAL}
        header = encode_header(specs, {"features": json.dumps(about, sort_keys=True)})
        try:
            with replacing(self._path(digest)) as file:
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
