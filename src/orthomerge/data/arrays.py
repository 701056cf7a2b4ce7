"""Images in one .npz: x_train, y_train, x_test, y_test [, x_val, y_val], label_names. Pickles inside are refused."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthomerge.core.errors import CheckpointError
from orthomerge.data.memory import free_memory
from orthomerge.data.raw import Key, Part, Raw, split_named

if TYPE_CHECKING:
    from orthomerge.data.task import Split


_MOST_BYTES = 16 << 30  # unpacked: more does not fit in memory anyway
_NAME = re.compile(r"([xy])_(.+)")
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
    most = min(_MOST_BYTES, free_memory())
    if size > most:
        raise CheckpointError(
            f"{path} unpacks to {size} bytes, but at most {most} are read on this machine; give a smaller file, or "
            "pictures in folders"
        )


def _read(path: Path, files: list[str], load: Callable[[str], Array]) -> Raw:
    names = _names(path, load("label_names")) if "label_names" in files else {}
    arrays: dict[Split, dict[str, str]] = {}
    for file in files:
        found = _NAME.fullmatch(file)
        if found is None:
            continue
        split = split_named(found[2])
        if split is None or found[1] in arrays.get(split, {}):
            raise CheckpointError(f"{path}: array {file!r} must be of split train, val or test, and the only one of it")
        arrays.setdefault(split, {})[found[1]] = file
    parts: dict[Split, Part] = {}
    first: dict[Key, str] = {}
    for split, pair in arrays.items():
        if "x" not in pair or ("y" not in pair and split == "train"):
            raise CheckpointError(f"{path}: the {split} split needs both x_{split} and y_{split}, got {list(pair)}")
        images = _images(path, pair["x"], load(pair["x"]))
        keys = None if "y" not in pair else _keys(path, pair["y"], load(pair["y"]), len(images))
        for place, key in enumerate(keys or ()):
            if key not in first:
                first[key] = f"{path}: {pair['y']}[{place}]"
        parts[split] = Part(images, keys)
    if not parts:
        raise CheckpointError(f"{path} must hold x_train, y_train, x_test and y_test, got {', '.join(files)}")
    return Raw(str(path), "image", parts, names, first)


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
