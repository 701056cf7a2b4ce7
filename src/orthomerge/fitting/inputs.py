"""The inputs of all tasks as an encoder reads them, prepared once, with what each task's expert makes of its own.

All tasks' inputs lie under each other, so that a batch over all tasks is one look-up. Texts are padded to the longest
of all and cut to the longest of a batch, which is what a tokenizer would have padded to. Where everything together
takes more than a third of the free memory, inputs are prepared batch by batch instead.

Letters: N inputs of all tasks, n of one; a *row* is a number from 0 to N - 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.data.inputs import pick
from orthomerge.data.processing import batches

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Examples
    from orthomerge.fitting.layout import FlatEncoder

__all__ = ["Groups", "Inputs", "encoded", "features_of", "prepare"]

Groups = tuple[tuple[int, int | None], ...]  # where each ends, and to how many tokens it is padded

_CHUNK = 512
_SHARE = 3  # of free memory, what prepared inputs may take
_PASS, _LONG_PASS = {"cpu": 200}, 2000  # tokens that a pass more costs as much as


@dataclass(frozen=True)
class Inputs:
    """`rows`: those of each task. `teacher`: what its expert makes of each input, [N, d] in float32 on the device."""

    rows: Mapping[str, torch.Tensor]
    teacher: torch.Tensor
    device: torch.device
    _examples: Mapping[str, Examples]
    _processor: Processor
    _tensors: Mapping[str, torch.Tensor] | None
    _lengths: torch.Tensor | None  # of texts, on the CPU: to ask the GPU would be to wait for it

    def batch(self, rows: torch.Tensor, longest: int | None = None) -> dict[str, torch.Tensor]:
        """The inputs of some rows, in that order, on the device; rows on the CPU need no `longest` text."""
        if self._tensors is None:
            return self._made(rows.cpu())
        if longest is None and self._lengths is not None:
            longest = int(self._lengths[rows].max())
        places = rows.to(self.device, non_blocking=True)
        return {name: tensor[places, :longest] for name, tensor in self._tensors.items()}

    def batches(self, task: str, size: int = 256) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """All inputs of a task in order: rows, and the batch."""
        for rows in torch.split(self.rows[task], size):
            yield rows, self.batch(rows)

    def only(self, rows: Mapping[str, torch.Tensor]) -> Inputs:
        """Some of the inputs of each task; nothing is copied."""
        return replace(self, rows=dict(rows))

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
        """The inputs of a task as they were read: texts, or pictures as arrays."""
        return pick(self._examples[task].inputs, (self.rows[task] - self._starts()[task]).tolist())

    @property
    def processor(self) -> Processor:
        return self._processor

    def _starts(self) -> dict[str, int]:
        """The first row of every task."""
        starts, start = {}, 0
        for task, examples in self._examples.items():
            starts[task] = start
            start += len(examples)
        return starts

    def _made(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        parts, order = [], []
        for task, start in self._starts().items():
            examples = self._examples[task]
            mine = ((rows >= start) & (rows < start + len(examples))).nonzero().flatten()
            if len(mine):
                places = (rows[mine] - start).tolist()
                parts.append(next(batches(examples, self._processor, len(places), order=places)))
                order.append(mine)
        back = torch.cat(order).argsort()
        return {name: tensor[back].to(self.device) for name, tensor in _stacked(parts).items()}


def prepare(
    examples: Mapping[str, Examples],
    processor: Processor,
    teacher: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
) -> Inputs:
    """All inputs of all tasks; `teacher`: the features [n, d] that each task's expert makes of its own."""
    rows, start = {}, 0
    for task, some in examples.items():
        rows[task] = torch.arange(start, start + len(some))
        start += len(some)
    parts: list[dict[str, torch.Tensor]] | None = []
    size, room = 0, _room(device)
    for some in examples.values():
        for part in batches(some, processor, _CHUNK):
            size += sum(tensor.nbytes for tensor in part.values())
            if parts is None or size > room:
                parts = None
                break
            parts.append(part)
    tensors, lengths = None, None
    if parts is not None:
        stacked = _stacked(parts)
        mask = stacked.get("attention_mask")
        if mask is not None:
            ends = (mask != 0).long() * torch.arange(1, mask.shape[1] + 1)
            lengths = ends.max(1).values
        tensors = {name: tensor.to(device) for name, tensor in stacked.items()}
    features = torch.cat([teacher[task].float() for task in examples]).to(device)
    return Inputs(rows, features, device, dict(examples), processor, tensors, lengths)


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
def encoded(encoder: FlatEncoder, inputs: Inputs, task: str, *, size: int = 256, half: bool = False) -> torch.Tensor:
    """The features of a task's inputs under the encoder's present weights, [n, d] in float32 on the device."""
    rows = inputs.rows[task]
    order = inputs.by_length(rows)
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=half):
        parts = [encoder.features(inputs.batch(some)).float() for some in torch.split(rows[order], size)]
    return torch.cat(parts)[order.argsort().to(encoder.device)]


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
