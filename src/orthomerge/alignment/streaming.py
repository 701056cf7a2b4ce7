"""Sums over the features of two encoders, batch by batch: any number of inputs in the memory of a few of them.

Features are gone once they are added up, and nothing is kept on disk. Workers take consecutive runs of the inputs, each
with the number of its first one, and add their sums; under torchrun, every process takes some of the batches, and their
sums are added up in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orthomerge.alignment.folding import read_by
from orthomerge.alignment.sums import FOLDS, Sums, moments_of
from orthomerge.distributed.group import Group, current_group
from orthomerge.features.extract import encode, order_of
from orthomerge.features.statistics import Moments

if TYPE_CHECKING:
    import torch

    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Examples
    from orthomerge.features.parts import Reading, Share
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
    features; under torchrun, those of the first process.
    """
    group = current_group()
    if group.driving:
        from orthomerge.features.parts import Reading, shareable, shares_of

        models = {"merged": merged, "expert": expert}
        if shareable(processor, *(part for each in models.values() for part in (each.encoder, each.family))):
            readings = [Reading.of(name, each.encoder, each.family, each.pooling) for name, each in models.items()]
            given: dict[str, Any] = {"task": task, "batch": batch}
            order = order_of(merged.family, merged.pooling, examples, processor, **given, autocast="float32", by=True)
            job = _Job(readings, processor, head, first, {**given, "device": device})
            own = replace(job, shares=shares_of(group, order, examples, batch), watch=watch)
            return group.call(_sums_of_part, own, replace(job, readings=[each.for_others() for each in readings]))

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


@dataclass(frozen=True)
class _Job:
    """The merged encoder's reading and the expert's; `shares` and `watch` are the first process's alone."""

    readings: list[Reading]
    processor: Processor
    head: Head
    first: int
    options: dict[str, Any]
    shares: list[Share] | None = None
    watch: Callable[[torch.Tensor], None] | None = None


def _sums_of_part(group: Group, job: _Job) -> Sums:
    """What one process adds, and then all together; the same in each of them."""
    share = group.scatter(job.shares)
    ours, theirs = (each.walk(share, job.processor, **job.options) for each in job.readings)
    with closing(ours), closing(theirs):
        watch = job.watch or (lambda features: None)
        mine = _summed(ours, theirs, job.head, first=job.first, task=job.options["task"], watch=watch)
    return Sums(tuple(_all_together(group, part) for part in mine.parts), mine.task)


def _all_together(group: Group, part: Moments) -> Moments:
    """The moments of all processes, as one tensor: they are all in float64, and counts are exact in it."""
    import torch

    tensors = (part.sum_h, part.sum_t, part.C, part.S, part.tt)
    flat = torch.cat([torch.tensor([part.n], dtype=torch.float64), *(each.reshape(-1) for each in tensors)])
    n, *found = torch.split(group.sum_(flat), [1, *(each.numel() for each in tensors)])
    return Moments(round(float(n)), *(each.view(like.shape) for each, like in zip(found, tensors, strict=True)))


_Waiting = list[tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]]


def _added(sums: Sums, waiting: _Waiting) -> Sums:
    """The sums with some batches: row numbers, H and T of each."""
    import torch

    rows, H, T = (torch.cat(parts) for parts in zip(*waiting, strict=True))
    fold = rows % FOLDS
    parts = (part + moments_of((H[fold == number], T[fold == number])) for number, part in enumerate(sums.parts))
    return Sums(tuple(parts), sums.task)
