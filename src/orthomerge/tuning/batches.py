"""Labelled inputs in the order of a seed, as batches on the device; training images can be moved a little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from orthomerge.core.device import derive
from orthomerge.core.errors import RecipeError
from orthomerge.models.prepared import Batch, Part, Pool
from orthomerge.models.processing import ImageProcessor, PixelProcessor, TextProcessor

if TYPE_CHECKING:
    from orthomerge.data.task import Examples, Task
    from orthomerge.models.processing import Processor


Place = tuple[int, list[int]]  # number of a task, and which of its examples

_PART = 8  # an image moves by at most its side over this
_PIXELS = "pixel_values"
# Of other processors it is unknown whether a row depends on the rest of its batch.
_KEPT = (TextProcessor, PixelProcessor, ImageProcessor)


class Feed:
    """Turns places into batches on a device.

    Sources that fit into `room` bytes are processed once, when they are first used, and kept on the device.
    """

    def __init__(
        self, sources: Sequence[Examples], processor: Processor, device: torch.device, *, room: int = 0
    ) -> None:
        self._sources, self._processor, self._device = sources, processor, device
        self._room = room if type(processor) in _KEPT else 0
        self._pools: dict[int, Pool] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples each source has."""
        return tuple(map(len, self._sources))

    def batch(self, place: Place) -> tuple[Batch, torch.Tensor]:
        """Inputs and labels of one place; labels that are unknown are -1."""
        number, rows = place
        if number not in self._pools:
            pool = Pool.of([Part(self._sources[number], self._processor)], self._device, room=self._room)
            self._room -= pool.nbytes
            self._pools[number] = pool
        every = self._sources[number].labels
        labels = torch.full((len(rows),), -1) if every is None else torch.as_tensor(every[rows])
        return self._pools[number].batch(torch.tensor(rows)), labels.to(self._device)

    def ordered(self, number: int, size: int) -> Iterator[tuple[Batch, torch.Tensor]]:
        """The whole of one source in its own order."""
        rows = range(len(self._sources[number]))
        return (self.batch((number, list(rows[start : start + size]))) for start in rows[::size])


def epoch_order(sizes: Sequence[int], batch: int, *, seed: int, epoch: int) -> list[Place]:
    """Every example of every task once: shuffled, cut into batches, and the batches of all tasks shuffled."""
    places: list[Place] = []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(derive(seed, "examples", number, epoch))
        rows = torch.randperm(size, generator=generator).tolist()
        places += [(number, rows[start : start + batch]) for start in range(0, size, batch)]
    if len(sizes) == 1:
        return places
    generator = torch.Generator().manual_seed(derive(seed, "tasks", epoch))
    return [places[at] for at in torch.randperm(len(places), generator=generator).tolist()]


def sample(size: int, count: int, *, seed: int, step: int) -> list[int]:
    """Some of `size` examples, none twice, for one step."""
    generator = torch.Generator().manual_seed(derive(seed, "others", step))
    rows: list[int] = torch.randperm(size, generator=generator)[:count].tolist()
    return rows


def moved(batch: Mapping[str, torch.Tensor], *, seed: int, step: int) -> Batch:
    """The batch of one step with every image moved by its own draw, which depends on seed and step alone."""
    images = batch[_PIXELS]
    generator = torch.Generator().manual_seed(derive(seed, "shift", step))
    most = [side // _PART for side in images.shape[2:]]
    moves = [torch.randint(-by, by + 1, (len(images),), generator=generator) for by in most]
    return {**batch, _PIXELS: shift(images, torch.stack(moves, 1))}


def shift(images: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """Images [B, C, H, W] moved down and to the right by `moves` [B, 2] pixels; the edge is repeated."""
    count, channels, height, width = images.shape
    down, right = moves.to(images.device).unsqueeze(2).unbind(1)
    rows = (torch.arange(height, device=images.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - right).clamp(0, width - 1)
    which = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    colours = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return images[which, colours, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]


def check_labelled(task: Task, split: str) -> Examples:
    """The examples of a split that training or validation can use."""
    examples = task[split]
    if len(examples) == 0:
        raise RecipeError(f"the {split} split of task {task.name!r} is empty; it must have examples")
    if examples.labels is None:
        raise RecipeError(
            f"the {split} split of task {task.name!r} has no labels; an expert is made from labelled data"
        )
    return examples
