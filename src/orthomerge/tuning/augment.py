"""Training images moved a little, so that a small set lasts longer: what they show stays what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orthomerge.tuning.settings import derive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orthomerge.tuning.settings import Augment


_PART = 8  # an image moves by at most its side over this
_PIXELS = "pixel_values"


def augment(batch: Mapping[str, torch.Tensor], how: Augment, *, seed: int, step: int) -> dict[str, torch.Tensor]:
    """The batch of one step, every image changed by its own draw; the draws depend on seed and step alone."""
    if how == "none":
        return dict(batch)
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
