"""Inputs as a page can show them: texts cut short, images as small PNGs inside the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np

from orthomerge.core.errors import RecipeError

CUT = 200  # characters
_SIZES = ((32, 64), (24, 32), (16, 16))  # pixels a side at most, and colours


def short_text(text: str, *, most: int = CUT) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def thumbnails(images: Sequence[Any], *, most: int) -> tuple[str, ...]:
    """Every image as a data URI, all of them within `most` characters; none if that cannot be."""
    for side, colours in _SIZES:
        made, length = [], 0
        for image in images:
            made.append(_uri(image, side, colours))
            length += len(made[-1])
            if length > most:
                break
        else:
            return tuple(made)
    return ()


def _uri(image: Any, side: int, colours: int) -> str:
    try:
        from PIL import Image
    except ImportError as error:
        raise RecipeError("showing pictures needs Pillow: pip install 'orthomerge[models]'") from error
    pixels = np.asarray(image)
    picture = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    if max(picture.size) > side:
        picture.thumbnail((side, side))
    if picture.mode != "L":
        picture = picture.convert("RGB").quantize(colours)
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
