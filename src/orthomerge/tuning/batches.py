"""Batches of labelled inputs, shuffled by a seed, on a device; training images can be shifted."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from orthomerge.core.device import derive
from orthomerge.data.task import Examples
from orthomerge.models.prepared import Batch, Part, Pool
from orthomerge.models.processing import ImageProcessor, PixelProcessor, Processor, TextProcessor

_PART = 8  # an image is shifted by at most 1 / _PART of its side
_PIXELS = "pixel_values"
# The inputs of other processors are not kept: rows could depend on the rest of their batch.
_KEPT = (TextProcessor, PixelProcessor, ImageProcessor)


class Feed:
    """Batches of examples (missing labels: -1), kept on the device if they fit `room` bytes. `sizes`: per source."""

    def __init__(
        self, sources: Sequence[Examples], processor: Processor, device: torch.device, *, room: int = 0
    ) -> None:
        self.sizes = tuple(map(len, sources))
        self._starts = tuple(accumulate(self.sizes, initial=0))
        self._pool = Pool.of(
            [Part(source, processor) for source in sources], device, room=room if type(processor) in _KEPT else 0
        )
        labels = [[-1] * len(source) if source.labels is None else source.labels.tolist() for source in sources]
        self._labels = torch.tensor([label for part in labels for label in part])

    def batch(self, number: int, rows: torch.Tensor) -> tuple[Batch, torch.Tensor]:
        rows = rows + self._starts[number]
        return self._pool.batch(rows), self._labels[rows].to(self._pool.device)

    def ordered(self, number: int, size: int) -> Iterator[tuple[Batch, torch.Tensor]]:
        return (self.batch(number, rows) for rows in torch.split(torch.arange(self.sizes[number]), size))


def epoch_order(sizes: Sequence[int], batch: int, *, seed: int, epoch: int) -> list[tuple[int, torch.Tensor]]:
    """Shuffle each source, split it into batches, and shuffle these: source and rows of every batch of an epoch."""
    batches = []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(derive(seed, "examples", number, epoch))
        batches += [(number, rows) for rows in torch.split(torch.randperm(size, generator=generator), batch)]
    if len(sizes) == 1:
        return batches
    generator = torch.Generator().manual_seed(derive(seed, "tasks", epoch))
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def sample(size: int, count: int, *, seed: int, step: int) -> torch.Tensor:
    """Draw at most `count` distinct rows of `size` for one step."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive(seed, "others", step)))[:count]


def shifted(batch: Mapping[str, torch.Tensor], *, seed: int, step: int) -> Batch:
    """Shift every image of a batch at random, by seed and step."""
    images = batch[_PIXELS]
    generator = torch.Generator().manual_seed(derive(seed, "shift", step))
    most = [side // _PART for side in images.shape[2:]]
    moves = [torch.randint(-limit, limit + 1, (len(images),), generator=generator) for limit in most]
    return {**batch, _PIXELS: shift(images, torch.stack(moves, 1))}


def shift(images: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """Shift images [B, C, H, W] down and to the right by `moves` [B, 2] pixels, repeating the edge."""
    count, channels, height, width = images.shape
    down, right = moves.to(images.device).unsqueeze(2).unbind(1)
    rows = (torch.arange(height, device=images.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - right).clamp(0, width - 1)
    numbers = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    colours = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return images[numbers, colours, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]
