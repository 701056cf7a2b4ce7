"""Inputs that are processed once and kept on a device, or batch by batch where they do not fit.

Inputs of several sources form one pool. Texts are padded to the longest of all and cut to the longest of a batch, so
that a batch is the one that the processor makes of the same inputs.

Letters: N inputs; a *row* is the number of an input, from 0 to N - 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from typing import Any

import torch

from orthomerge.core.errors import IncompatibleError
from orthomerge.data.task import Examples
from orthomerge.models.processing import Processor, TextProcessor, batches

Batch = dict[str, torch.Tensor]

_CHUNK = 512  # inputs processed at a time
_MASK = "attention_mask"
_PASS, _LONG_PASS = {"cpu": 200}, 2000  # tokens whose computation takes as long as the overhead of one more pass


@dataclass(frozen=True)
class Part:
    """Inputs with their processor."""

    examples: Examples
    processor: Processor


@dataclass(frozen=True, eq=False)
class Pool:
    """Inputs of some parts. `kept`: all of them on the device, one row each, or None."""

    parts: tuple[Part, ...]
    device: torch.device
    kept: Mapping[str, torch.Tensor] | None

    @classmethod
    def of(cls, parts: Sequence[Part], device: torch.device, *, room: int) -> Pool:
        """Process all inputs, if they go together and fit into `room` bytes."""
        return cls(tuple(parts), device, _processed(parts, device, room) if room else None)

    def __len__(self) -> int:
        return sum(len(part.examples) for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.kept or {}).values())

    @cached_property
    def lengths(self) -> torch.Tensor | None:
        """Number of tokens of each kept text [N], on the CPU to avoid waiting for a GPU; None for other inputs."""
        mask = (self.kept or {}).get(_MASK)
        if mask is None:
            return None
        columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return ((mask != 0).long() * columns).max(1).values.cpu()

    def batch(self, rows: torch.Tensor) -> Batch:
        """The inputs of some rows (on the CPU), in that order, on the device."""
        if self.kept is None:
            return self._process(rows)
        places = rows.to(self.device, non_blocking=True)
        if self.lengths is None:
            return {name: tensor[places] for name, tensor in self.kept.items()}
        longest = int(self.lengths[rows].max())
        return {name: tensor[places, :longest] for name, tensor in self.kept.items()}

    def extended(self, parts: Sequence[Part], *, room: int) -> Pool:
        """The pool with more inputs after those that it has."""
        if not parts:
            return self
        kept = None
        if self.kept is not None and (more := _processed(parts, self.device, room)) is not None:
            kept = _stacked([self.kept, more], parts[0].processor)
        return Pool((*self.parts, *parts), self.device, kept)

    def raw(self, rows: Sequence[int]) -> list[Any]:
        """Some inputs as they were read: texts, or images as arrays."""
        numbers = [bisect_right(self._starts, row) - 1 for row in rows]
        return [
            self.parts[number].examples.inputs[row - self._starts[number]]
            for number, row in zip(numbers, rows, strict=True)
        ]

    def by_length(self, rows: torch.Tensor) -> torch.Tensor:
        """Places of rows from the shortest text to the longest; in their order where inputs have no length."""
        return torch.arange(len(rows)) if self.lengths is None else self.lengths[rows].argsort(stable=True)

    def groups(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Places of rows in one to three groups of similar length, whichever are cheapest to encode group by group.

        Short texts beside long ones cost padding, each further group costs the overhead of another pass.
        """
        order = self.by_length(rows)
        if self.lengths is None:
            return (order,)
        lengths: list[int] = self.lengths[rows][order].tolist()
        overhead, last = _PASS.get(self.device.type, _LONG_PASS), len(rows)

        def cost(ends: tuple[int, ...]) -> int:
            starts = (0, *ends[:-1])
            return sum((end - start) * lengths[end - 1] + overhead for start, end in zip(starts, ends, strict=True))

        cuts = sorted({last * part // 8 for part in range(1, 8)} - {0})
        choices = [(*ends, last) for count in range(3) for ends in combinations(cuts, count)]
        return torch.tensor_split(order, min(choices, key=cost)[:-1])

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each part."""
        return list(accumulate((len(part.examples) for part in self.parts), initial=0))[:-1]

    def _process(self, rows: torch.Tensor) -> Batch:
        processed, order = [], []
        for start, part in zip(self._starts, self.parts, strict=True):
            mine = ((rows >= start) & (rows < start + len(part.examples))).nonzero().flatten()
            if len(mine):
                places = (rows[mine] - start).tolist()
                processed.append(next(batches(part.examples, part.processor, len(places), order=places)))
                order.append(mine)
        back = torch.cat(order).argsort()
        stacked = _stacked(processed, self.parts[0].processor)
        return {name: tensor[back].to(self.device) for name, tensor in stacked.items()}


def _processed(parts: Sequence[Part], device: torch.device, room: int) -> Batch | None:
    """All inputs of some parts on the device; None if they do not fit, or do not go together."""
    processed: list[Batch] = []
    size = 0
    try:
        for part in parts:
            for batch in batches(part.examples, part.processor, _CHUNK):
                size += sum(tensor.nbytes for tensor in batch.values())
                processed.append(batch)
                # Another tensor without tokens would be a mask of padding: then images depend on their batch.
                if size > room or not _alike(batch, processed[0]) or (_MASK not in batch and len(batch) > 1):
                    return None
    except IncompatibleError:  # raised again for the batch that holds such inputs
        return None
    if not processed:
        return None
    return {name: tensor.to(device) for name, tensor in _stacked(processed, parts[0].processor).items()}


def _alike(one: Batch, other: Batch) -> bool:
    return list(one) == list(other) and (
        _MASK in one or all(tensor.shape[1:] == other[name].shape[1:] for name, tensor in one.items())
    )


def _stacked(parts: Sequence[Mapping[str, torch.Tensor]], processor: Processor) -> Batch:
    """Rows under each other; rows of tokens are padded as the processor would pad them."""
    if _MASK not in parts[0]:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    padding: dict[str, int] = {}
    if isinstance(processor, TextProcessor):
        tokenizer = processor.tokenizer
        padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    width = max(part[_MASK].shape[1] for part in parts)
    stacked = {}
    for name in parts[0]:
        rows = []
        for part in parts:
            missing = width - part[name].shape[1]
            rows.append(torch.nn.functional.pad(part[name], (0, missing), value=padding.get(name, 0)))
        stacked[name] = torch.cat(rows)
    return stacked
