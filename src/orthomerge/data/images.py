"""Pictures: decoding one with a limit on what it may unpack to, and folders of them, split/class/*.png or class/*.png.

A picture is a uint8 array [H, W] or [H, W, 3], turned as its camera says (EXIF), as `datasets` does; transparency is
dropped. Those in folders are decoded when they are used.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orthomerge.core.errors import CheckpointError, RecipeError, some
from orthomerge.data.raw import Raw, by_split, split_named
from orthomerge.data.task import Lazy, Split

if TYPE_CHECKING:
    from PIL.Image import Image

    Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others run programs, or nobody uses them
_MOST_PIXELS = 1 << 26
_MOST_BYTES = 1 << 28  # of one file
_GREY = ("1", "L", "LA")
_LITTER = ("thumbs.db", "desktop.ini")  # what file managers leave behind; hidden files are theirs, too


def decode(source: Path | bytes, *, where: str) -> Pixels:
    """The pixels of a picture; `where` names it in messages."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise RecipeError("reading pictures needs Pillow: pip install 'orthomerge[models]'") from error
    try:
        # From memory: a length in a file makes Pillow ask for so many bytes at once, four gigabytes if need be.
        data = source if isinstance(source, bytes) else _read(source)
        with Image.open(BytesIO(data), formats=_FORMATS) as picture:
            _check_size(picture, where)
            return pixels(ImageOps.exif_transpose(picture), where)
    except CheckpointError:
        raise
    except Exception as error:  # each format's reader has errors of its own, and bombs are warnings or errors
        raise CheckpointError(f"{where} cannot be decoded ({error}); it is damaged, or no picture") from error


def _check_size(picture: Image, where: str) -> None:
    width, height = picture.size
    if width * height > _MOST_PIXELS:
        raise CheckpointError(
            f"{where} is {width} x {height}; more than {_MOST_PIXELS} pixels is refused: make it smaller"
        )


def pixels(picture: Image, where: str) -> Pixels:
    """The pixels of an opened picture; `where` names it in messages."""
    if picture.mode.startswith("I;16"):
        return (np.asarray(picture) >> 8).astype(np.uint8)
    if picture.mode in ("I", "F"):
        raise CheckpointError(f"{where} has 32 bits a pixel (mode {picture.mode}); save it with 8 bits a channel")
    return np.asarray(picture.convert("L" if picture.mode in _GREY else "RGB"))


def read_folder(folder: Path) -> Raw:
    """A folder of pictures; the names of its folders are the classes. Files beside the folders are ignored."""
    names = [path.name for path in _folders(folder)]
    splits: dict[Split, Path] = {"train": folder}
    if all(map(split_named, names)):
        splits = {split: folder / name for split, name in by_split(names, folder).items()}
    raw = Raw(str(folder), "image")
    for split, path in splits.items():
        homes = _folders(path)
        files = [picture for home in homes for picture in _pictures(home)]
        if not files:
            raise CheckpointError(f"the {split} split {path} is empty: there must be a folder of pictures per class")
        raw.add(split, Lazy(files, _load), [file.parent.name for file in files], (str(file.parent) for file in files))
        raw.names |= {home.name: home.name for home in homes}
    return raw


def _read(path: Path) -> bytes:
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; more than {_MOST_BYTES} is refused: make it smaller")
    return path.read_bytes()


def _load(path: Path) -> object:
    return decode(path, where=str(path))


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _pictures(home: Path) -> list[Path]:
    entries = sorted(path for path in home.iterdir() if not path.name.startswith("."))
    entries = [path for path in entries if path.name.casefold() not in _LITTER]
    strange = [path.name for path in entries if path.is_dir() or path.suffix.casefold() not in _SUFFIXES]
    if strange:
        raise CheckpointError(
            f"{home} must hold the pictures of one class, got {some(strange)}; splits are called train, val and test, "
            "and hold a folder for every class"
        )
    return entries
