"""Images in one .npz: x_train, y_train, x_test, y_test [, x_val, y_val], label_names. Pickles inside are refused."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from orthomerge.core.errors import CheckpointError
from orthomerge.data.raw import Key, Raw, by_split, split_named

_MOST_BYTES = 16 << 30  # unpacked: more does not fit in memory anyway
_NAME = re.compile(r"[xy]_.+")
Array = np.ndarray[Any, np.dtype[Any]]


def read_arrays(path: Path) -> Raw:
    """An .npz file: images uint8 [N, H, W] or [N, H, W, 3], labels as ids [N]."""
    try:
        with zipfile.ZipFile(path) as packed:
            _check_size(path, sum(entry.file_size for entry in packed.infolist()))
        with np.load(path, allow_pickle=False) as archive:
            return _read(path, archive.files, archive.__getitem__)
    except CheckpointError:
        raise
    except Exception as error:  # zip, zlib, header and memory each fail in their own way
        raise CheckpointError(f"{path} cannot be read as .npz ({error}); it is damaged, or holds pickles") from error


def _check_size(path: Path, size: int) -> None:
    """Refuse what does not fit into the memory that is free, where the system says how much that is."""
    most = _MOST_BYTES
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        most = min(most, 1024 * int(free.split()[1]))
    if size > most:
        raise CheckpointError(
            f"{path} unpacks to {size} bytes, but at most {most} are read on this machine; give a smaller file, or "
            "pictures in folders"
        )


def _read(path: Path, files: list[str], load: Callable[[str], Array]) -> Raw:
    raw = Raw(str(path), "image")
    if "label_names" in files:
        raw.names = _names(path, load("label_names"))
    arrays = [file for file in files if _NAME.fullmatch(file)]
    for file in arrays:
        if split_named(file[2:]) is None:
            raise CheckpointError(f"{path}: array {file!r} must be of split train, val or test")
    inputs, labels = (by_split((file[2:] for file in arrays if file[0] == kind), f"{path}: {kind}_") for kind in "xy")
    for split in {**inputs, **labels}:
        if split not in inputs or (split == "train" and split not in labels):
            lacking = "x" if split not in inputs else "y"
            raise CheckpointError(f"{path}: the {split} split needs x_{split} and y_{split}, but {lacking} is missing")
        images = _images(path, f"x_{inputs[split]}", load(f"x_{inputs[split]}"))
        name = f"y_{labels.get(split)}"
        keys = _keys(path, name, load(name), len(images)) if split in labels else None
        raw.add(split, images, keys, (f"{path}: {name}[{number}]" for number in count()))
    if not raw.parts:
        raise CheckpointError(f"{path} must hold x_train, y_train, x_test and y_test, got {', '.join(files)}")
    return raw


def _images(path: Path, name: str, values: Array) -> list[Array]:
    grey = values.ndim == 4 and values.shape[3] == 1
    if values.dtype != np.uint8 or not (values.ndim == 3 or (values.ndim == 4 and (grey or values.shape[3] == 3))):
        raise CheckpointError(
            f"{path}: {name} must be uint8 [N, H, W] or [N, H, W, 3], got {values.dtype} {list(values.shape)}"
        )
    if not len(values):
        raise CheckpointError(f"{path}: {name} is empty; give at least one image")
    return list(values[..., 0] if grey else values)


def _keys(path: Path, name: str, values: Array, count: int) -> list[Key]:
    if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) != count:
        raise CheckpointError(
            f"{path}: {name} must hold {count} whole numbers, got {values.dtype} {list(values.shape)}"
        )
    keys: list[Key] = values.tolist()
    return keys


def _names(path: Path, values: Array) -> dict[Key, str]:
    if values.ndim != 1 or values.dtype.kind != "U" or not len(values):
        raise CheckpointError(f"{path}: label_names must be texts, got {values.dtype} {list(values.shape)}")
    return {place: str(name) for place, name in enumerate(values)}
