"""The inputs that a fit looks at, prepared once, and what the experts make of them.

All inputs lie under each other in one pool, so that a batch over all tasks is one look-up. Texts are padded to the
longest of all and cut to the longest of a batch, which is what a tokenizer would have padded to. Where everything
together takes more than a third of the free memory, inputs are prepared batch by batch instead.

Each task has targets: what its expert makes of some inputs of the pool. One input may be a target of several tasks.

Letters: N inputs in the pool, n targets of one task; a *row* is a number from 0 to N - 1.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.data.task import Lazy
from orthomerge.models.processing import batches

if TYPE_CHECKING:
    from orthomerge.data.task import Examples
    from orthomerge.fitting.layout import FlatEncoder
    from orthomerge.models.processing import Processor


Groups = tuple[tuple[int, int | None], ...]  # where each ends, and to how many tokens it is padded

_CHUNK = 512
_SHARE = 3  # of free memory, what prepared inputs may take
_PASS, _LONG_PASS = {"cpu": 200}, 2000  # tokens that a pass more costs as much as


@dataclass(frozen=True)
class Targets:
    """What one task's expert makes of inputs, and how much each of them counts.

    `rows` [n]: which inputs of the pool, on the CPU, each at most once. `features` [n, d] and `weights` [n]: in float32
    on the device. What a method computes for a target is multiplied by its weight; means are over the number of
    targets.
    """

    rows: torch.Tensor
    features: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, features: torch.Tensor, *, device: torch.device, weight: float = 1.0) -> Targets:
        """Targets that all count the same."""
        return cls(rows, features.float().to(device), torch.full((len(rows),), weight, device=device))

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: torch.Tensor | slice) -> Targets:
        """Some of them, by their places among the n."""
        if isinstance(places, slice):
            return Targets(self.rows[places], self.features[places], self.weights[places])
        there = places.to(self.features.device)
        return Targets(self.rows[places], self.features[there], self.weights[there])

    def followed_by(self, other: Targets) -> Targets:
        """These, then others of the same pool."""
        pairs = ((self.rows, other.rows), (self.features, other.features), (self.weights, other.weights))
        return Targets(*(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True)
class Part:
    """Inputs of the pool that one processor reads."""

    examples: Examples
    processor: Processor


@dataclass(frozen=True)
class Inputs:
    """`targets`: by task. `processors`: what reads further inputs of a task, whose head says how long texts may be.

    All targets are also numbered from 0 on, one task after the other in the order of `targets`; `starts` has the number
    of each task's first.
    """

    targets: Mapping[str, Targets]
    processors: Mapping[str, Processor]
    device: torch.device
    _parts: tuple[Part, ...]
    _tensors: Mapping[str, torch.Tensor] | None
    _lengths: torch.Tensor | None  # of texts, on the CPU: to ask the GPU would be to wait for it

    @cached_property
    def rows(self) -> torch.Tensor:
        """The row of each target, by its number."""
        return torch.cat([targets.rows for targets in self.targets.values()])

    @cached_property
    def shared(self) -> bool:
        """Whether an input is a target of several tasks."""
        return len(torch.unique(self.rows)) < len(self.rows)

    @cached_property
    def starts(self) -> dict[str, int]:
        sizes = [len(targets) for targets in self.targets.values()]
        return dict(zip(self.targets, accumulate(sizes, initial=0), strict=False))

    @property
    def size(self) -> int:
        """N."""
        return sum(len(part.examples) for part in self._parts)

    def batch(self, rows: torch.Tensor, longest: int | None = None) -> dict[str, torch.Tensor]:
        """The inputs of some rows, in that order, on the device; rows on the CPU need no `longest` text."""
        if self._tensors is None:
            return self._made(rows.cpu())
        if longest is None and self._lengths is not None:
            longest = int(self._lengths[rows].max())
        places = rows.to(self.device, non_blocking=True)
        return {name: tensor[places, :longest] for name, tensor in self._tensors.items()}

    def batches(self, task: str, size: int = 256) -> Iterator[tuple[Targets, dict[str, torch.Tensor]]]:
        """All inputs of a task in order: their targets, and the batch."""
        targets = self.targets[task]
        for start in range(0, len(targets), size):
            some = targets.at(slice(start, start + size))
            yield some, self.batch(some.rows)

    def with_targets(self, targets: Mapping[str, Targets]) -> Inputs:
        """The same pool with other targets."""
        return replace(self, targets=dict(targets))

    def at(self, places: Mapping[str, torch.Tensor | slice]) -> Inputs:
        """Some targets of some tasks, by their places among each task's own."""
        return self.with_targets({task: self.targets[task].at(some) for task, some in places.items()})

    def extended(self, parts: Sequence[Part]) -> Inputs:
        """The pool with more inputs after those that it has; the targets stay."""
        if not parts:
            return self
        tensors = None if self._tensors is None else _processed(parts, self.device)
        if tensors is not None and self._tensors is not None:
            tensors = _stacked([self._tensors, tensors])
        return replace(self, _parts=(*self._parts, *parts), _tensors=tensors, _lengths=_lengths(tensors))

    def by_length(self, rows: torch.Tensor) -> torch.Tensor:
        """Places of some rows from the shortest text to the longest; as they come where inputs have no length."""
        if self._lengths is None:
            return torch.arange(len(rows))
        return self._lengths[rows].argsort(stable=True)

    def grouped(self, rows: torch.Tensor) -> tuple[Groups, torch.Tensor]:
        """The groups that are cheapest to encode one by one, and the places of some rows in their order.

        A short text beside a long one is padded to its length; a group more is a pass more. So the cheapest of one, two
        or three groups of texts from short to long is taken, a pass being worth `_PASS` tokens.
        """
        if self._lengths is None:
            return ((len(rows), None),), torch.arange(len(rows))
        order = self.by_length(rows)
        lengths: list[int] = self._lengths[rows][order].tolist()
        cuts = sorted({len(rows) * part // 8 for part in range(1, 8)} - {0})
        overhead = _PASS.get(self.device.type, _LONG_PASS)

        def cost(*ends: int) -> int:
            starts = (0, *ends[:-1])
            return sum((end - start) * lengths[end - 1] + overhead for start, end in zip(starts, ends, strict=True))

        last = len(rows)
        choices = [(last,), *((cut, last) for cut in cuts)]
        choices += [(one, two, last) for one in cuts for two in cuts if one < two]
        best = min(choices, key=lambda ends: cost(*ends))
        return tuple((end, lengths[end - 1]) for end in best), order

    def raw(self, task: str) -> Sequence[Any]:
        """The inputs of a task as they were read: texts, or pictures as arrays, which are opened when asked for."""
        return Lazy([self._place(row) for row in self.targets[task].rows.tolist()], self._read)

    @cached_property
    def _first_rows(self) -> list[int]:
        return list(accumulate((len(part.examples) for part in self._parts), initial=0))[:-1]

    def _place(self, row: int) -> tuple[int, int]:
        """The part that a row lies in, and its place there."""
        number = bisect_right(self._first_rows, row) - 1
        return number, row - self._first_rows[number]

    def _read(self, place: tuple[int, int]) -> Any:
        return self._parts[place[0]].examples.inputs[place[1]]

    def _made(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        parts, order = [], []
        for start, part in zip(self._first_rows, self._parts, strict=True):
            mine = ((rows >= start) & (rows < start + len(part.examples))).nonzero().flatten()
            if len(mine):
                places = (rows[mine] - start).tolist()
                parts.append(next(batches(part.examples, part.processor, len(places), order=places)))
                order.append(mine)
        back = torch.cat(order).argsort()
        return {name: tensor[back].to(self.device) for name, tensor in _stacked(parts).items()}


def prepare(
    examples: Mapping[str, Examples],
    processors: Mapping[str, Processor],
    teacher: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
) -> Inputs:
    """Every task with inputs of its own; `teacher`: the features [n, d] that its expert makes of them."""
    targets, start = {}, 0
    for task, some in examples.items():
        targets[task] = Targets.of(torch.arange(start, start + len(some)), teacher[task], device=device)
        start += len(some)
    parts = [Part(some, processors[task]) for task, some in examples.items()]
    return pooled(parts, targets, processors, device=device)


def pooled(
    parts: Sequence[Part], targets: Mapping[str, Targets], processors: Mapping[str, Processor], *, device: torch.device
) -> Inputs:
    """Any inputs, and targets of any tasks among them."""
    tensors = _processed(parts, device)
    return Inputs(dict(targets), dict(processors), device, tuple(parts), tensors, _lengths(tensors))


def features_of(
    encoder: FlatEncoder, inputs: Inputs, rows: torch.Tensor, groups: Groups, order: torch.Tensor
) -> torch.Tensor:
    """The features of some rows, [B, d], under autograd, group by group; see `Inputs.grouped`."""
    if len(groups) == 1:
        return encoder.features(inputs.batch(rows, groups[0][1]))
    found, start = [], 0
    for end, longest in groups:
        found.append(encoder.features(inputs.batch(rows[order[start:end]], longest)))
        start = end
    return torch.cat(found)[order.argsort()]


@torch.no_grad()
def encoded_rows(
    encoder: FlatEncoder, inputs: Inputs, rows: torch.Tensor, *, size: int = 256, half: bool = False
) -> torch.Tensor:
    """The features of some rows under the encoder's present weights, [n, d] in float32 on the device."""
    order = inputs.by_length(rows)
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=half):
        parts = [encoder.features(inputs.batch(some)).float() for some in torch.split(rows[order], size)]
    return torch.cat(parts)[order.argsort().to(encoder.device)]


def encoded(encoder: FlatEncoder, inputs: Inputs, task: str, *, size: int = 256, half: bool = False) -> torch.Tensor:
    """The features of a task's inputs, see `encoded_rows`."""
    return encoded_rows(encoder, inputs, inputs.targets[task].rows, size=size, half=half)


def _processed(parts: Sequence[Part], device: torch.device) -> dict[str, torch.Tensor] | None:
    """All inputs of some parts on the device; None if they do not fit into their share of its memory."""
    made: list[dict[str, torch.Tensor]] = []
    size, room = 0, _room(device)
    for part in parts:
        for batch in batches(part.examples, part.processor, _CHUNK):
            size += sum(tensor.nbytes for tensor in batch.values())
            if size > room:
                return None
            made.append(batch)
    return {name: tensor.to(device) for name, tensor in _stacked(made).items()}


def _lengths(tensors: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
    """How many tokens each text has, padding left out; None where inputs have no length."""
    mask = None if tensors is None else tensors.get("attention_mask")
    if mask is None:
        return None
    ends = (mask != 0).long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return ends.max(1).values.cpu()


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // _SHARE
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // _SHARE


def _stacked(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows under each other. Rows of tokens are padded with zeros, which the mask leaves out."""
    found = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        if "attention_mask" in parts[0]:
            longest = max(tensor.shape[1] for tensor in tensors)
            tensors = [torch.nn.functional.pad(tensor, (0, longest - tensor.shape[1])) for tensor in tensors]
        found[name] = torch.cat(tensors)
    return found
