"""Decoding one picture into a uint8 array [H, W] or [H, W, 3], with a limit on what it may unpack to.

Pictures are turned as their camera says (EXIF), as `datasets` does; transparency is dropped, as everybody does.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orthomerge.core.errors import CheckpointError, RecipeError

if TYPE_CHECKING:
    from PIL.Image import Image


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others run programs, or nobody uses them
_MOST_PIXELS = 1 << 26
_MOST_BYTES = 1 << 28  # of one file
_GREY = ("1", "L", "LA")


def decode(source: Path | bytes, *, where: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
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
    except Exception as error:  # each format's reader raises what it likes, and bombs are warnings or errors
        raise CheckpointError(f"{where} cannot be decoded ({error}); it is damaged, or no picture") from error


def _read(path: Path) -> bytes:
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; more than {_MOST_BYTES} is refused: make it smaller")
    return path.read_bytes()


def _check_size(picture: Image, where: str) -> None:
    width, height = picture.size
    if width * height > _MOST_PIXELS:
        raise CheckpointError(
            f"{where} is {width} x {height}; more than {_MOST_PIXELS} pixels is refused: make it smaller"
        )


def pixels(picture: Image, where: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The pixels of an opened picture; `where` names it in messages."""
    if picture.mode.startswith("I;16"):
        return (np.asarray(picture) >> 8).astype(np.uint8)
    if picture.mode in ("I", "F"):
        raise CheckpointError(f"{where} has 32 bits a pixel (mode {picture.mode}); save it with 8 bits a channel")
    return np.asarray(picture.convert("L" if picture.mode in _GREY else "RGB"))
