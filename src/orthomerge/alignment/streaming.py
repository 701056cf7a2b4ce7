"""Sums over the features of two encoders, batch by batch: any number of inputs in the memory of a few of them.

Features are gone once they are added up, and nothing is kept on disk. Workers take consecutive runs of the inputs, each
with the number of its first one, and add their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from orthomerge.alignment.folding import read_by
from orthomerge.alignment.sums import FOLDS, Sums, moments_of
from orthomerge.features.extract import encode

if TYPE_CHECKING:
    import torch

    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Examples
    from orthomerge.heads import Head
    from orthomerge.merged import Merged

__all__ = ["stream_sums"]

_ROWS = 2048  # that are added at once: the sums are as large as a thousand inputs or so


def stream_sums(
    merged: Merged,
    expert: Merged,
    examples: Examples,
    processor: Processor,
    head: Head,
    *,
    task: str,
    first: int = 0,
    batch: int = 64,
    device: str = "auto",
    watch: Callable[[torch.Tensor], None] = lambda features: None,
) -> Sums:
    """What both encoders make of the same inputs, as the head reads it, in sums.

    `first`: the number of the first of `examples` among all inputs of the task. `watch` is shown every batch of merged
    features.
    """

    def walk(model: Merged) -> closing[Generator[tuple[torch.Tensor, torch.Tensor]]]:
        return closing(
            encode(
                model.encoder, model.family, model.pooling, examples, processor, task=task, batch=batch, device=device
            )
        )

    with walk(merged) as ours, walk(expert) as theirs:
        return _summed(ours, theirs, head, first=first, task=task, watch=watch)


_Parts = Generator[tuple["torch.Tensor", "torch.Tensor"]]


def _summed(
    ours: _Parts, theirs: _Parts, head: Head, *, first: int, task: str, watch: Callable[[torch.Tensor], None]
) -> Sums:
    """Over both encoders' features, walked side by side."""
    sums, waiting = Sums.zero(head.width, task), _Waiting()
    for (places, H), (others, T) in zip(ours, theirs, strict=True):
        if not places.equal(others):
            raise AssertionError(f"two encoders walked the inputs of {task!r} in different orders")
        watch(H)
        waiting.append((first + places, read_by(head, H), read_by(head, T)))
        if sum(len(rows) for rows, _, _ in waiting) >= _ROWS:
            sums, waiting = _added(sums, waiting), _Waiting()
    return _added(sums, waiting) if waiting else sums


_Waiting = list[tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]]


def _added(sums: Sums, waiting: _Waiting) -> Sums:
    """The sums with some batches: row numbers, H and T of each."""
    import torch

    rows, H, T = (torch.cat(parts) for parts in zip(*waiting, strict=True))
    fold = rows % FOLDS
    parts = (part + moments_of((H[fold == number], T[fold == number])) for number, part in enumerate(sums.parts))
    return Sums(tuple(parts), sums.task)
