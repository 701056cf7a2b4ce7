"""Images to pixel values in pure torch, a batch at a time: for models that come without an image processor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from orthomerge.core.errors import IncompatibleError, RecipeError

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Modality


@dataclass(frozen=True)
class PixelProcessor:
    """Images resized (bilinear, antialiased, only if they must be) and normalised: (pixel / 255 - mean) / std.

    `size`: of a square, or height and width. `mean`, `std`: one number, or one a channel. Grey images are repeated
    over three channels where the model has them.
    """

    modality: ClassVar[Modality] = "image"
    size: int | tuple[int, int]
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    channels: int = 3

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or min(self.height_and_width) < 1:
            raise RecipeError(f"images must have 1 or 3 channels and a size, got {self.channels} and {self.size}")
        wrong = len(self.mean) not in (1, self.channels) or len(self.std) not in (1, self.channels)
        if wrong or min(self.std) <= 0:
            raise RecipeError(
                f"'mean' and 'std' must have 1 or {self.channels} numbers, std above 0, got {self.mean} and {self.std}"
            )

    @property
    def height_and_width(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        import torch

        # Grey images stay grey until after resizing: a third of the work.
        images = [with_channels(image, 1 if np.ndim(image) == 2 else self.channels) for image in inputs]
        if len({image.shape for image in images}) == 1:
            scaled = self._scaled(np.stack(images))
        else:
            scaled = torch.cat([self._scaled(image[None]).expand(1, self.channels, -1, -1) for image in images])
        mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (self.mean, self.std))
        values = (scaled - mean) / std
        return {"pixel_values": values.expand(-1, self.channels, -1, -1).contiguous()}

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(["pixels", asdict(self)], sort_keys=True).encode()).hexdigest()

    def _scaled(self, images: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
        """[N, H, W, C] in bytes to [N, C, height, width] from 0 to 1."""
        import torch

        scaled = torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32) / 255
        if tuple(scaled.shape[2:]) != self.height_and_width:
            scaled = torch.nn.functional.interpolate(
                scaled, self.height_and_width, mode="bilinear", antialias=True, align_corners=False
            )
        return scaled


def with_channels(image: Any, channels: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image [H, W] or [H, W, C] as [H, W, channels]; grey is repeated, colour is never thrown away."""
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise IncompatibleError(f"an image must be uint8 [H, W] or [H, W, 3], got {pixels.dtype} {list(pixels.shape)}")
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.shape[2] == 1 and channels > 1:
        pixels = np.repeat(pixels, channels, axis=2)
    if pixels.shape[2] != channels:
        raise IncompatibleError(
            f"the model reads images with {channels} channel{'s' * (channels > 1)}, got {pixels.shape[2]}"
        )
    return pixels
