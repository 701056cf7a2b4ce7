"""Processing of inputs into batches for an encoder: texts by a tokenizer, images by an image processor.

The digest of a processor covers its files and options, so that features can be cached by content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.data.task import Examples, Modality, pick

if TYPE_CHECKING:
    import numpy as np
    import torch

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Processor(Protocol):
    """Callable that turns inputs into a batch of tensors with one row per input, in order."""

    @property
    def modality(self) -> Modality: ...

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]: ...

    def digest(self) -> str: ...


@dataclass(frozen=True)
class TextProcessor:
    """A tokenizer; texts are cut at `max_length` tokens and padded to the longest of their batch.

    `segments`: whether the model has token types. `files`: digest of the tokenizer's files.
    """

    modality: ClassVar[Modality] = "text"
    tokenizer: Any = field(repr=False)
    max_length: int
    segments: bool
    files: str = field(repr=False)

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        odd = next((item for item in inputs if not isinstance(item, str)), None)
        if odd is not None:
            raise IncompatibleError(f"inputs of a text model must be texts, got {type(odd).__name__}; give strings")
        return dict(
            self.tokenizer(
                list(inputs),
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_attention_mask=True,
                return_token_type_ids=self.segments,
                return_tensors="pt",
            )
        )

    def digest(self) -> str:
        return json_digest({"files": self.files, "max_length": self.max_length, "segments": self.segments})


@dataclass(frozen=True)
class ImageProcessor:
    """An image processor of transformers; grey images become RGB for a model with three channels."""

    modality: ClassVar[Modality] = "image"
    processor: Any = field(repr=False)
    channels: int
    files: str = field(repr=False)

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        images = [_with_channels(image, self.channels) for image in inputs]
        try:
            encoded = self.processor(images=images, return_tensors="pt", input_data_format="channels_last")
        except ValueError as error:
            raise IncompatibleError(
                f"{type(self.processor).__name__} cannot make one batch of these images: {error}; "
                "resize them to one size"
            ) from error
        return dict(encoded)

    def digest(self) -> str:
        return json_digest({"files": self.files, "channels": self.channels})


@dataclass(frozen=True)
class PixelProcessor:
    """Image processing in torch: resizing (bilinear, antialiased, only if needed), then (pixel / 255 - mean) / std.

    `size`: side of a square, or height and width. `mean`, `std`: one, or one per channel. Grey is repeated.
    """

    modality: ClassVar[Modality] = "image"
    size: int | tuple[int, int]
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    channels: int = 3

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or min(self.height_and_width) < 1:
            raise RecipeError(
                f"images must have 1 or 3 channels and a size, got {self.channels} and {self.size}; correct the config"
            )

    @property
    def height_and_width(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        # Grey images stay grey until after resizing: a third of the work.
        images = [_with_channels(image, 1 if np.ndim(image) == 2 else self.channels) for image in inputs]
        scaled = torch.stack([self._scaled(image).expand(self.channels, -1, -1) for image in images])
        mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (self.mean, self.std))
        return {"pixel_values": (scaled - mean) / std}

    def digest(self) -> str:
        return json_digest(["pixels", asdict(self)])

    def _scaled(self, image: Pixels) -> torch.Tensor:
        import torch

        scaled = torch.tensor(image).permute(2, 0, 1).to(torch.float32) / 255
        if tuple(scaled.shape[1:]) == self.height_and_width:
            return scaled
        resize = torch.nn.functional.interpolate
        return resize(scaled[None], self.height_and_width, mode="bilinear", antialias=True, align_corners=False)[0]


def batches(
    examples: Examples, processor: Processor, size: int, *, order: Sequence[int] | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Process all examples, or those with the numbers in `order`, in batches of `size`; the last may be smaller."""
    import torch

    numbers = range(len(examples)) if order is None else order
    for start in range(0, len(numbers), size):
        chunk = numbers[start : start + size]
        with torch.autocast("cpu", enabled=False):  # the caller's autocast is for the encoder, not for resizing
            batch = processor(pick(examples.inputs, chunk))
        for name, tensor in batch.items():
            if len(tensor) != len(chunk):
                raise IncompatibleError(
                    f"a processor must make one row per input, got {len(tensor)} rows of {name!r} from {len(chunk)} "
                    "inputs; give another one"
                )
        yield batch


def json_digest(content: Mapping[str, Any] | list[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _with_channels(image: Any, channels: int) -> Pixels:
    """Convert an image [H, W] or [H, W, C] to [H, W, channels]; grey is repeated, colour is never dropped."""
    import numpy as np

    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise IncompatibleError(
            f"images must be uint8 [H, W] or [H, W, C], got {pixels.dtype} {list(pixels.shape)}; convert them"
        )
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.shape[2] == 1 and channels > 1:
        pixels = np.repeat(pixels, channels, axis=2)
    if pixels.shape[2] != channels:
        raise IncompatibleError(
            f"the model reads images with {channels} channel{'s' * (channels > 1)}, got {pixels.shape[2]}; convert them"
        )
    return pixels
