"""Read pictures: single files, folders per class (split/class/*.png or class/*.png), and arrays in one .npz.

A picture is a uint8 array [H, W] or [H, W, 3], rotated by its EXIF tag, without transparency. Pictures in folders
are decoded when they are used. An .npz holds x_train, y_train, x_test, y_test [, x_val, y_val], label_names.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orthomerge.core.errors import CheckpointError, some
from orthomerge.data.labels import Key, Raw, by_split, split_named
from orthomerge.data.task import Lazy, Split
from orthomerge.files.raw_file import RawFile

if TYPE_CHECKING:
    from PIL.Image import Image

    Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others run programs, or nobody uses them
_MAX_PIXELS = 1 << 26
_MAX_BYTES = 1 << 28  # of one picture's file
_MAX_ARRAYS = 16 << 30  # bytes, unpacked; more would not fit in memory
_GREY = ("1", "L", "LA")
_IGNORED = ("thumbs.db", "desktop.ini")
_NAME = re.compile(r"[xy]_.+")
Array = np.ndarray[Any, np.dtype[Any]]


def decode(source: Path | bytes, *, where: str) -> Pixels:
    """Return the pixels of a picture; `where` names it in messages."""
    from PIL import Image, ImageOps

    try:
        # From memory: for a file, Pillow allocates any length that a header states, up to four gigabytes.
        data = source if isinstance(source, bytes) else RawFile(source).whole(_MAX_BYTES)
        with Image.open(BytesIO(data), formats=_FORMATS) as picture:
            _check_size(picture, where)
            return pixels(ImageOps.exif_transpose(picture), where)
    except CheckpointError:
        raise
    except Exception as error:  # every format has errors of its own, and decompression bombs are warnings or errors
        raise CheckpointError(f"{where} cannot be decoded ({error}); it is damaged, or not a picture") from error


def _check_size(picture: Image, where: str) -> None:
    if picture.width * picture.height > _MAX_PIXELS:
        size = f"{picture.width} x {picture.height}"
        raise CheckpointError(f"{where} must have at most {_MAX_PIXELS} pixels, got {size}; make it smaller")


def pixels(picture: Image, where: str) -> Pixels:
    """Return the pixels of an opened picture; `where` names it in messages."""
    if picture.mode.startswith("I;16"):
        return (np.asarray(picture) >> 8).astype(np.uint8)
    if picture.mode in ("I", "F"):
        raise CheckpointError(f"{where} has 32 bits per pixel (mode {picture.mode}); save it with 8 bits per channel")
    return np.asarray(picture.convert("L" if picture.mode in _GREY else "RGB"))


def read_folder(folder: Path) -> Raw:
    """Read pictures from a folder with one sub-folder per class; files beside the sub-folders are ignored."""
    names = [path.name for path in _folders(folder)]
    splits: dict[Split, Path] = {"train": folder}
    if all(map(split_named, names)):
        splits = {split: folder / name for split, name in by_split(names, folder).items()}
    raw = Raw(str(folder), "image")
    for split, path in splits.items():
        classes = _folders(path)
        files = [picture for folder in classes for picture in _pictures(folder)]
        if not files:
            raise CheckpointError(f"the {split} split {path} is empty: there must be a folder of pictures per class")
        inputs = Lazy(files, lambda file: decode(file, where=str(file)))
        raw.add(split, inputs, [file.parent.name for file in files], (str(file.parent) for file in files))
        raw.names |= {folder.name: folder.name for folder in classes}
    return raw


def _entries(folder: Path) -> list[Path]:
    names = sorted(path.name for path in folder.iterdir())
    return [folder / name for name in names if not name.startswith(".") and name.casefold() not in _IGNORED]


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir()]


def _pictures(folder: Path) -> list[Path]:
    entries = _entries(folder)
    others = [path.name for path in entries if path.is_dir() or path.suffix.casefold() not in _SUFFIXES]
    if others:
        raise CheckpointError(
            f"{folder} must hold the pictures of one class, got {some(others)}; "
            "splits are called train, val and test, and hold a folder per class"
        )
    return entries


def read_arrays(path: Path) -> Raw:
    """Read an .npz file: images uint8 [N, H, W] or [N, H, W, 3], labels as ids [N]."""
    try:
        with zipfile.ZipFile(path) as packed:
            _check_room(path, sum(entry.file_size for entry in packed.infolist()))
        with np.load(path, allow_pickle=False) as archive:
            return _read(path, archive.files, archive.__getitem__)
    except CheckpointError:
        raise
    except Exception as error:  # zip, zlib, header and memory each fail in their own way
        raise CheckpointError(f"{path} cannot be read as .npz ({error}); it is damaged, or holds pickles") from error


def _check_room(path: Path, size: int) -> None:
    """Refuse an archive that is larger, unpacked, than the limit or, if the system reports it, the free memory."""
    limit = _MAX_ARRAYS
    with suppress(OSError, ValueError, IndexError):
        free = re.findall(r"^MemAvailable: *(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)[0]
        limit = min(limit, 1024 * int(free))
    if size > limit:
        raise CheckpointError(
            f"{path} must unpack to at most {limit} bytes on this machine, got {size}; "
            "give a smaller file, or pictures in folders"
        )


def _read(path: Path, files: list[str], load: Callable[[str], Array]) -> Raw:
    raw = Raw(str(path), "image")
    if "label_names" in files:
        names = load("label_names")
        if names.ndim != 1 or names.dtype.kind != "U" or not len(names):
            raise CheckpointError(f"{path}: label_names must be texts, got {names.dtype} {list(names.shape)}")
        raw.names = {index: str(name) for index, name in enumerate(names)}
    arrays = [file for file in files if _NAME.fullmatch(file)]
    for file in arrays:
        if split_named(file[2:]) is None:
            raise CheckpointError(f"{path}: array {file!r} must be named after a split: train, val or test")
    inputs, labels = (by_split((file[2:] for file in arrays if file[0] == kind), f"{path}: {kind}_") for kind in "xy")
    for split in {**inputs, **labels}:
        if split not in inputs or (split == "train" and split not in labels):
            missing = "x" if split not in inputs else "y"
            raise CheckpointError(f"{path}: the {split} split needs x_{split} and y_{split}, but {missing} is missing")
        images = _images(path, f"x_{inputs[split]}", load(f"x_{inputs[split]}"))
        name = f"y_{labels.get(split)}"
        keys = _keys(path, name, load(name), len(images)) if split in labels else []
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
