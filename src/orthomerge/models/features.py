"""Features of inputs, and a cache of features on disk.

An entry of the cache is one safetensors file, named by the hash of its key: `values` [n, d] in float32, and in the
header a seal, the hash of key, shape and values. Entries are replaced atomically. If header, shape or seal of an entry
are wrong, the features are computed again. Features do not depend on labels, so tasks that share inputs share an entry.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, OutputError
from orthomerge.data.task import Examples, Split
from orthomerge.files.checkpoint import Spec
from orthomerge.files.replacing import replace_file
from orthomerge.files.safetensors import encode_header, read_metadata, read_safetensors

if TYPE_CHECKING:
    import torch


VARIABLE = "ORTHOMERGE_CACHE"


@dataclass(frozen=True)
class Features:
    """Features [n, d] in float32 on the CPU, in the order of the inputs; labels [n] (int64) if known."""

    values: torch.Tensor
    task: str
    split: Split
    labels: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise IncompatibleError(f"features must be [n, d], got {tuple(self.values.shape)}; give one row per input")
        if self.labels is not None and len(self.labels) != len(self.values):
            raise IncompatibleError(f"{len(self.values)} features but {len(self.labels)} labels; give one per row")

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, values: torch.Tensor, examples: Examples, task: str) -> Features:
        import torch

        labels = None if examples.labels is None else torch.tensor(examples.labels, dtype=torch.int64)
        return cls(values, task, examples.split, labels)

    def take(self, rows: torch.Tensor) -> Features:
        labels = None if self.labels is None else self.labels[rows]
        return Features(self.values[rows], self.task, self.split, labels)

    def unlabelled(self) -> Features:
        return Features(self.values, self.task, self.split)


@dataclass(frozen=True)
class FeaturePair:
    """Features of the same inputs under the merged encoder and the expert's encoder."""

    merged: Features
    expert: Features

    def __post_init__(self) -> None:
        one, other = self.merged, self.expert
        if (len(one), one.task, one.split) != (len(other), other.task, other.split):
            raise IncompatibleError(
                f"a pair must hold features of the same inputs, got {len(one)} of {one.task}/{one.split} and "
                f"{len(other)} of {other.task}/{other.split}; encode the same examples with both models"
            )


class FeatureCache:
    """Cache in `folder`, by default in `features` of $ORTHOMERGE_CACHE or of `~/.cache/orthomerge`."""

    def __init__(self, folder: str | Path | None = None) -> None:
        place = Path(os.environ.get(VARIABLE) or "~/.cache/orthomerge", "features") if folder is None else Path(folder)
        try:
            self.folder = place.expanduser()
        except RuntimeError as error:  # a user without home
            raise OutputError(f"cannot keep features in {place}: {error}; set {VARIABLE} to a folder") from error

    def get_or_compute(self, key: Mapping[str, Any], rows: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return features [rows, d], computed only if not in the cache. `key`: all that they depend on, as JSON."""
        import torch

        path = self.path(key)
        values = _read(path, rows)
        if values is None:
            self._prepare()
            values = compute().detach().to("cpu", torch.float32).contiguous()
            metadata = {"features": json.dumps(key, sort_keys=True), "seal": _seal(path, values)}
            header = encode_header({"values": Spec(tuple(values.shape), "F32")}, metadata)
            replace_file(path, header, values.numpy().data)
        return values

    def path(self, key: Mapping[str, Any]) -> Path:
        return self.folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.safetensors"

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(0, "no permission")
        except OSError as error:
            raise OutputError(
                f"cannot keep features in {self.folder}: {error.strerror}; set {VARIABLE} to a folder that can be "
                "written to"
            ) from error


def _read(path: Path, rows: int) -> torch.Tensor | None:
    try:
        entries, seal = read_safetensors(path), read_metadata(path).get("seal")
        if list(entries) != ["values"]:
            return None
        spec = entries["values"].spec
        if spec.dtype != "F32" or len(spec.shape) != 2 or spec.shape[0] != rows:
            return None
        values = entries["values"].read(0, spec.numel).reshape(spec.shape)
    except CheckpointError:
        return None
    return values if _seal(path, values) == seal else None


def _seal(path: Path, values: torch.Tensor) -> str:
    sha = hashlib.sha256(f"{path.stem} {tuple(values.shape)}:".encode())
    sha.update(values.numpy().data)
    return sha.hexdigest()
