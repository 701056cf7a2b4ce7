"""Inputs that are processed once and kept; batches picked from them are those that the processor makes, to the byte.

Only for the processors of `orthomerge.data`: of others nobody knows whether a row depends on the rest of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from orthomerge.core.errors import IncompatibleError
from orthomerge.models.processing import ImageProcessor, PixelProcessor, TextProcessor, batches

if TYPE_CHECKING:
    from orthomerge.data.task import Examples
    from orthomerge.models.processing import Processor


_CHUNK = 1024  # inputs processed at once
_PIXELS, _IDS, _TYPES, _MASK = "pixel_values", "input_ids", "token_type_ids", "attention_mask"


@dataclass
class Room:
    """Bytes that the stores of a run may still take."""

    left: int

    def take(self, size: int) -> bool:
        """Whether so much was left; then it is taken."""
        if size > self.left:
            return False
        self.left -= size
        return True


class Store(Protocol):
    """Processed inputs of one source, on a device."""

    def pick(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The batch of some inputs; `rows` are on the CPU."""
        ...


def make_store(source: Examples, processor: Processor, device: torch.device, room: Room) -> Store | None:
    """Process all inputs of a source; None where that cannot be, or where there is no room."""
    if not len(source):
        return None
    try:
        if type(processor) is TextProcessor:
            return _texts(source, processor, device, room)
        if type(processor) in (PixelProcessor, ImageProcessor):
            return _images(source, processor, device, room)
    except IncompatibleError:  # inputs that do not go together; whoever asks for a batch of them hears of it
        return None
    return None


@dataclass(frozen=True)
class _Images:
    """Pixels [N, C, H, W]."""

    pixels: torch.Tensor

    def pick(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {_PIXELS: self.pixels.index_select(0, rows.to(self.pixels.device))}


@dataclass(frozen=True)
class _Texts:
    """Tokens one text after the other; `tokens` and `padding` are by the tokenizer's names, in its order.

    `lengths` and `starts` [N] are on the CPU, so that nobody waits for a GPU to hear how long the longest text is.
    """

    tokens: Mapping[str, torch.Tensor]
    padding: Mapping[str, int]
    lengths: torch.Tensor
    starts: torch.Tensor
    left: bool

    def pick(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        device, count = self.tokens[_IDS].device, len(self.tokens[_IDS])
        longest = int(self.lengths[rows].max())
        lengths, starts = torch.stack([self.lengths[rows], self.starts[rows]]).unsqueeze(2).to(device)
        places = torch.arange(longest, device=device).expand(len(rows), -1)
        if self.left:
            places = places - (longest - lengths)
        there = (places >= 0) & (places < lengths)
        index = (starts + places).clamp(0, count - 1)
        return {
            name: there.long() if name == _MASK else torch.where(there, self.tokens[name][index], value)
            for name, value in self.padding.items()
        }


def _images(source: Examples, processor: Processor, device: torch.device, room: Room) -> _Images | None:
    first = next(batches(source, processor, 1, order=[0]))
    # A second tensor would be a mask of padding, and so say that images depend on their batch.
    if set(first) != {_PIXELS} or not room.take(len(source) * first[_PIXELS].nbytes):
        return None
    shape = first[_PIXELS].shape[1:]
    pixels = torch.empty(len(source), *shape, dtype=first[_PIXELS].dtype, device=device)
    done = 0
    for batch in batches(source, processor, _CHUNK):
        part = batch[_PIXELS]
        if part.shape[1:] != shape:
            return None
        pixels[done : done + len(part)] = part.to(device)
        done += len(part)
    return _Images(pixels)


def _texts(source: Examples, processor: TextProcessor, device: torch.device, room: Room) -> _Texts | None:
    tokenizer, names = processor.tokenizer, [_IDS, *([_TYPES] if processor.segments else [])]
    if not room.take(8 * len(names) * len(source) * processor.max_length):  # at most
        return None
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    counts = []
    for batch in batches(source, processor, _CHUNK):
        mask = batch[_MASK].bool()
        if set(batch) != {*names, _MASK} or not bool(mask.any(1).all()):
            return None
        counts.append(mask.sum(1))
        for name in names:
            parts[name].append(batch[name][mask])
    lengths = torch.cat(counts)
    values = {_IDS: tokenizer.pad_token_id, _TYPES: tokenizer.pad_token_type_id, _MASK: 0}
    return _Texts(
        tokens={name: torch.cat(part).to(device) for name, part in parts.items()},
        padding={name: values[name] for name in batch},
        lengths=lengths,
        starts=lengths.cumsum(0) - lengths,
        left=tokenizer.padding_side == "left",
    )
