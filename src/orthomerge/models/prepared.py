"""Inputs that are processed once and kept on a device, or batch by batch if they do not fit.

Inputs of several sources form one pool. Kept texts are padded to the longest of all, and a batch is cut to its longest
text, so that it equals the batch that the processor makes from the same inputs.

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
from torch.nn.utils.rnn import pad_sequence

from orthomerge.core.errors import IncompatibleError
from orthomerge.data.task import Examples
from orthomerge.models.processing import Processor, TextProcessor, batches

Batch = dict[str, torch.Tensor]

_CHUNK = 512  # inputs processed at a time
_MASK = "attention_mask"
_PASS, _LONG_PASS = {"cpu": 200}, 2000  # tokens that cost as much as the overhead of a pass


@dataclass(frozen=True)
class Part:
    examples: Examples
    processor: Processor


@dataclass(frozen=True, eq=False)
class Pool:
    """Inputs of all parts. `kept`: processed inputs on the device, one row per input, or None."""

    parts: tuple[Part, ...]
    device: torch.device
    kept: Mapping[str, torch.Tensor] | None

    @classmethod
    def of(cls, parts: Sequence[Part], device: torch.device, *, room: int) -> Pool:
        """Make a pool; inputs are processed now if they have the same tensors and fit into `room` bytes."""
        return cls(tuple(parts), device, _processed(parts, device, room) if room else None)

    def __len__(self) -> int:
        return sum(len(part.examples) for part in self.parts)

    @cached_property
    def lengths(self) -> torch.Tensor | None:
        """Number of tokens of each kept text [N], on the CPU to avoid waiting for a GPU; None for other inputs."""
        mask = (self.kept or {}).get(_MASK)
        if mask is None:
            return None
        columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return ((mask != 0).long() * columns).max(1).values.cpu()

    def batch(self, rows: torch.Tensor) -> Batch:
        """Return the inputs of some rows as a batch on the device. `rows`: on the CPU."""
        if self.kept is None:
            return self._process(rows)
        on_device = rows.to(self.device, non_blocking=True)
        if self.lengths is None:
            return {name: tensor[on_device] for name, tensor in self.kept.items()}
        longest = int(self.lengths[rows].max())
        return {name: tensor[on_device, :longest] for name, tensor in self.kept.items()}

    def raw(self, rows: Sequence[int]) -> list[Any]:
        inputs = []
        for row in rows:
            number = bisect_right(self._starts, row) - 1
            inputs.append(self.parts[number].examples.inputs[row - self._starts[number]])
        return inputs

    def by_length(self, rows: torch.Tensor) -> torch.Tensor:
        """Indices into `rows` from the shortest text to the longest; in order if inputs have no length."""
        return torch.arange(len(rows)) if self.lengths is None else self.lengths[rows].argsort(stable=True)

    def groups(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split indices into `rows` into one to three groups of similar length that are cheapest to encode in turn."""
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
        return list(accumulate((len(part.examples) for part in self.parts), initial=0))[:-1]

    def _process(self, rows: torch.Tensor) -> Batch:
        processed, order = [], []
        for start, part in zip(self._starts, self.parts, strict=True):
            in_part = ((rows >= start) & (rows < start + len(part.examples))).nonzero().flatten()
            if len(in_part):
                numbers = (rows[in_part] - start).tolist()
                processed.append(next(batches(part.examples, part.processor, len(numbers), order=numbers)))
                order.append(in_part)
        inverse = torch.cat(order).argsort()
        batch = _concatenated(processed, self.parts[0].processor)
        return {name: tensor[inverse].to(self.device) for name, tensor in batch.items()}


def _processed(parts: Sequence[Part], device: torch.device, room: int) -> Batch | None:
    """Process all inputs onto the device; None if they do not fit, or have different tensors."""
    processed: list[Batch] = []
    size = 0
    try:
        for part in parts:
            for batch in batches(part.examples, part.processor, _CHUNK):
                size += sum(tensor.nbytes for tensor in batch.values())
                processed.append(batch)
                # Images with a second tensor have a padding mask, so they depend on their batch.
                if size > room or not _match(batch, processed[0]) or (_MASK not in batch and len(batch) > 1):
                    return None
    except IncompatibleError:  # raised again when the batch of these inputs is used
        return None
    if not processed:
        return None
    return {name: tensor.to(device) for name, tensor in _concatenated(processed, parts[0].processor).items()}


def _match(one: Batch, other: Batch) -> bool:
    return list(one) == list(other) and (
        _MASK in one or all(tensor.shape[1:] == other[name].shape[1:] for name, tensor in one.items())
    )


def _concatenated(parts: Sequence[Mapping[str, torch.Tensor]], processor: Processor) -> Batch:
    padding: dict[str, int] = {}
    if isinstance(processor, TextProcessor):
        tokenizer = processor.tokenizer
        padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    concatenated = {}
    for name in parts[0]:
        rows = [row for part in parts for row in part[name]]
        concatenated[name] = pad_sequence(rows, batch_first=True, padding_value=padding.get(name, 0))
    return concatenated
