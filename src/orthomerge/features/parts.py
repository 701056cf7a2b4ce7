"""Encoding by all processes of a group: each takes every so manieth batch, and the first one gets all features.

Batches are those that one process would make, so features are the same whatever the number of processes (to the bit;
on GPUs, to the last digits: which batches are played back, see `playing`, depends on who has them). An encoder is sent
once, not for every task; who is sent nothing has it already.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pickle import PicklingError
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch

from orthomerge.data.inputs import Lazy, pick
from orthomerge.data.task import Examples
from orthomerge.distributed.group import Group, current_group
from orthomerge.distributed.packing import pack
from orthomerge.features.extract import order_of, prepared_part, walk

if TYPE_CHECKING:
    from orthomerge.data.processing import Processor
    from orthomerge.features.extract import Precision
    from orthomerge.models.family import Family

__all__ = ["Reading", "Share", "encode_in_parts", "sendable", "shareable", "shares_of"]


@dataclass(frozen=True)
class Reading:
    """An encoder and how it is read. `encoder`: None where it is the one that came last under the same `name`."""

    name: str
    encoder: torch.nn.Module | None
    family: str
    pooling: str

    @classmethod
    def of(cls, name: str, encoder: torch.nn.Module, family: Family, pooling: str) -> Reading:
        return cls(name, encoder, family.name, pooling)

    def for_others(self) -> Reading:
        """The same without the encoder, if they have it."""
        if self.encoder is None:
            raise AssertionError("the first process always has the encoder")
        versions = tuple((id(each), each._version) for each in self.encoder.parameters())  # noqa: SLF001 - its only name
        known = _sent.get(self.name)
        if known is not None and known[0]() is self.encoder and known[1] == versions:
            return replace(self, encoder=None)
        _sent[self.name] = ref(self.encoder), versions
        return self

    def received(self) -> torch.nn.Module:
        """The encoder, in any process."""
        if self.encoder is not None:
            _kept[self.name] = self.encoder
        return _kept[self.name]

    def walk(
        self,
        share: Share,
        processor: Processor,
        *,
        task: str,
        batch: int,
        device: str,
        autocast: Precision = "float32",
    ) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
        """Places and features of a share."""
        from orthomerge.models.families import family

        prepared = prepared_part(share.places, share.examples, processor, batch)
        found = family(self.family)
        return walk(self.received(), found, self.pooling, prepared, task=task, device=device, autocast=autocast)


@dataclass(frozen=True)
class Share:
    """Some examples, and where each belongs among all."""

    places: list[int]
    examples: Examples


_sent: dict[str, tuple[ReferenceType[torch.nn.Module], tuple[tuple[int, int], ...]]] = {}
_kept: dict[str, torch.nn.Module] = {}


@dataclass(frozen=True)
class _Job:
    """`shares` are the first process's alone."""

    reading: Reading
    processor: Processor
    options: dict[str, Any]
    shares: list[Share] | None = field(default=None, repr=False)


def encode_in_parts(
    encoder: torch.nn.Module,
    family: Family,
    pooling: str,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    batch: int = 64,
    device: str = "auto",
    autocast: Precision = "float32",
    by_length: bool = True,
) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """What `encode` gives, by all processes; in one part for each of them."""
    group = current_group()
    checked: dict[str, Any] = {"task": task, "batch": batch, "autocast": autocast}
    order = order_of(family, pooling, examples, processor, **checked, by=by_length)
    reading = Reading.of("features", encoder, family, pooling)
    job = _Job(reading, processor, {**checked, "device": device})
    own = replace(job, shares=shares_of(group, order, examples, batch))
    yield from group.call(_encode, own, replace(job, reading=reading.for_others()))


def shareable(*given: object) -> bool:
    """Whether other processes can be sent these: families of the table, and what pickle takes."""
    from orthomerge.models.families import FAMILIES, family
    from orthomerge.models.family import Family

    families = [each for each in given if isinstance(each, Family)]
    if any(each.name not in FAMILIES or family(each.name) is not each for each in families):
        return False
    try:
        pack([each for each in given if not isinstance(each, Family)], whole=False)
    except (PicklingError, AttributeError, TypeError):
        return False
    return True


def shares_of(group: Group, order: list[int], examples: Examples, batch: int) -> list[Share]:
    """Every so manieth batch for each process."""
    found = []
    chunks = [order[start : start + batch] for start in range(0, len(order), batch)]
    for rank in range(group.world):
        places = [place for chunk in chunks[rank :: group.world] for place in chunk]
        some = Examples(pick(examples.inputs, places), None, examples.split)
        found.append(Share(places, sendable(some) if rank else some))
    return found


def sendable(examples: Examples) -> Examples:
    """The same without labels, for another process: inputs that only this one can open are opened now."""
    inputs = examples.inputs
    if isinstance(inputs, Lazy) and not shareable(inputs.load):
        inputs = list(inputs)
    return Examples(inputs, None, examples.split)


def _encode(group: Group, job: _Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    share = group.scatter(job.shares)
    with closing(job.reading.walk(share, job.processor, **job.options)) as parts:
        pairs = list(parts)
    places = torch.cat([each for each, _ in pairs]) if pairs else torch.zeros(0, dtype=torch.int64)
    values = torch.cat([each for _, each in pairs]) if pairs else torch.zeros(0, 0)
    found = zip(group.gather(places, everywhere=False), group.gather(values, everywhere=False), strict=True)
    return [(where, part) for where, part in found if len(where)]
