"""Features of every input in one pass: none left out, none out of place, nothing of the encoder changed.

`encode` gives them part by part for whoever cannot hold them all (see `statistics`); `extract` collects them. An
accelerator is given the next batches while it works on the last, and its features are fetched some batches late, so
that it never waits for the host; passes of a small encoder are recorded and played back (`playing`). No thread prepares
inputs: it would fight with this one over Python's lock (seen on an H200: 6,600 texts a second through a BERT of six
layers, where the model alone did 20,800 and the tokenizer 19,000).

Under torchrun every process encodes some of the batches (see `parts`). They are those of one process, and so are the
features: to the bit on CPUs, and but for a GPU's last digits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from orthomerge.data.processing import batches
from orthomerge.distributed.group import current_group
from orthomerge.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError, nearest
from orthomerge.features.features import Features

if TYPE_CHECKING:
    import torch

    from orthomerge.data.processing import Processor
    from orthomerge.data.task import Examples
    from orthomerge.features.playing import Player
    from orthomerge.models.family import Family

__all__ = ["Precision", "device_of", "encode", "extract", "order_of", "prepared_part", "walk"]

# What the encoder computes in; float32: as its weights are, without autocast.
Precision = Literal["float32", "bfloat16", "float16"]

_Batch = Mapping[str, "torch.Tensor"]

_GROUP = 32  # batches that an accelerator gets, and whose features it sends back, together


def device_of(name: str) -> torch.device:
    """The device of a name; `auto` is the accelerator where there is one, else the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"unknown device {name!r}; {nearest(name, ['auto', *here])}") from error
    if device.type not in here:
        raise RecipeError(f"device {name!r} is not available, torch finds {' and '.join(here)} here; use 'auto'")
    if device.index is not None and device.type != "cpu" and current_group().several:
        raise RecipeError(
            f"under torchrun every process has an accelerator of its own, got {name!r}; use {device.type!r} or 'auto'"
        )
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise RecipeError(f"device {name!r} does not exist, the last one is '{device.type}:{count - 1}'; use 'auto'")
    return device


def extract(
    encoder: torch.nn.Module | Callable[..., Any],
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
    progress: Callable[[int], None] | None = None,
) -> Features:
    """Features of all examples in their order, with their labels. `progress` is told how many more are done.

    A module is run in eval mode and put back into its own; it is moved to the device and stays there. A function of
    parameters must have them on the device itself. `by_length` encodes texts of like length together, for less
    padding.
    """
    import torch

    options: dict[str, Any] = {"batch": batch, "device": device, "autocast": autocast, "by_length": by_length}
    parts: Generator[tuple[torch.Tensor, torch.Tensor]]
    if current_group().driving and isinstance(encoder, torch.nn.Module) and _shareable(encoder, family, processor):
        from orthomerge.features.parts import encode_in_parts

        parts = encode_in_parts(encoder, family, pooling, examples, processor, task=task, **options)
    else:
        parts = encode(encoder, family, pooling, examples, processor, task=task, **options)
    values: torch.Tensor | None = None
    filled = 0
    # Autocast around the whole pass, so that weights are cast once and not for each batch.
    with closing(parts), _autocast(device_of(device), autocast):
        for places, part in parts:
            if values is None:
                values = torch.empty(len(examples), part.shape[1], dtype=torch.float32)
            values.index_copy_(0, places, part)
            filled += len(places)
            if progress is not None:
                progress(len(places))
    if values is None or filled != len(examples):
        raise AssertionError(f"{filled} of {len(examples)} examples of {task!r} were encoded")
    labels = None if examples.labels is None else torch.tensor(examples.labels, dtype=torch.int64)
    return Features(values, task, examples.split, labels)


def encode(
    encoder: torch.nn.Module | Callable[..., Any],
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
    """Places [B] of some examples and their features [B, d] in float32 on the CPU, until every example has come once.

    The places do not depend on the encoder, so two of them can be walked side by side on one device.
    """
    places = order_of(family, pooling, examples, processor, task=task, batch=batch, autocast=autocast, by=by_length)
    made = batches(examples, processor, batch, order=places)
    return walk(encoder, family, pooling, _prepared(places, made, batch), task=task, device=device, autocast=autocast)


def order_of(
    family: Family,
    pooling: str,
    examples: Examples,
    processor: Processor,
    *,
    task: str,
    batch: int,
    autocast: Precision,
    by: bool,
) -> list[int]:
    """The order in which examples are encoded, by length or as they come; refuses what cannot be encoded at all."""
    if pooling not in family.poolings:
        raise RecipeError(f"family {family.name!r} has no pooling {pooling!r}; {nearest(pooling, family.poolings)}")
    if autocast not in get_args(Precision):
        raise RecipeError(f"unknown precision {autocast!r}; {nearest(autocast, get_args(Precision))}")
    if batch < 1:
        raise RecipeError(f"'batch' must be at least 1, got {batch}")
    if not len(examples):
        raise RecipeError(f"the {examples.split} split of {task!r} is empty; there is nothing to encode")
    return _order(examples, processor, by_length=by)


def walk(
    encoder: torch.nn.Module | Callable[..., Any],
    family: Family,
    pooling: str,
    prepared: Iterator[tuple[torch.Tensor, _Batch]],
    *,
    task: str,
    device: str,
    autocast: Precision,
) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """What `encode` gives, for batches that are prepared already: places, and the inputs at them."""
    pads = family.modality == "text"
    return _Reader(encoder, partial(family.features, pooling=pooling), task, device_of(device), autocast, pads).run(
        prepared
    )


def prepared_part(
    places: list[int], examples: Examples, processor: Processor, batch: int
) -> Iterator[tuple[torch.Tensor, _Batch]]:
    """Some examples in batches, in their order; `places`: where each belongs among all."""
    return _prepared(places, batches(examples, processor, batch), batch)


def _order(examples: Examples, processor: Processor, *, by_length: bool) -> list[int]:
    """Longest texts first, so that what does not fit into memory fails at once; images as they come."""
    if not by_length or processor.modality != "text":
        return list(range(len(examples)))
    lengths = np.fromiter(map(len, examples.inputs), np.int64, len(examples))
    found: list[int] = np.argsort(-lengths, kind="stable").tolist()
    return found


def _prepared(places: list[int], made: Iterator[_Batch], size: int) -> Iterator[tuple[torch.Tensor, _Batch]]:
    """Places and inputs batch by batch."""
    import torch

    for part in torch.split(torch.tensor(places), size) if places else ():
        with torch.autocast("cpu", enabled=False):  # it is for the encoder, not for resizing images
            inputs = next(made)
        yield part, inputs


@dataclass(frozen=True)
class _Reader:
    """An encoder with how it is to be read, and for whom. `pads`: whether more padding is as good as less."""

    encoder: torch.nn.Module | Callable[..., Any]
    read: Callable[..., torch.Tensor]
    task: str
    device: torch.device
    autocast: Precision
    pads: bool

    @property
    def _late(self) -> bool:
        """Whether features are fetched while the next batches are computed."""
        return self.device.type == "cuda"

    def run(self, prepared: Iterator[tuple[torch.Tensor, _Batch]]) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
        width: int | None = None
        late: deque[tuple[torch.Tensor, torch.Tensor, torch.Event | None]] = deque()
        with _evaluating(self.encoder, self.device):
            forward = self._player() or self._plainly
            while group := list(islice(prepared, _GROUP if self._late else 1)):
                values = self._forward([inputs for _, inputs in group], forward)
                for (places, _), found in zip(group, values, strict=True):
                    if found.ndim != 2 or len(found) != len(places) or found.shape[1] != (width or found.shape[1]):
                        raise IncompatibleError(
                            f"the encoder must give features ({len(places)}, {width or 'd'}) for {len(places)} inputs "
                            f"of {self.task!r}, got {tuple(found.shape)}; choose another pooling, or correct the "
                            "encoder"
                        )
                    width = found.shape[1]
                late.append(self._fetch([places for places, _ in group], values))
                if len(late) > self._late:
                    yield self._landed(*late.popleft())
            while late:
                yield self._landed(*late.popleft())

    def _player(self) -> Player | None:
        from orthomerge.features.playing import Player, recordable, width_of

        if not recordable(self.encoder, self.device):
            return None
        return Player(self._read, self.device, width=width_of(self.encoder) if self.pads else 0)

    def _plainly(self, group: list[_Batch]) -> list[torch.Tensor]:
        from orthomerge.features.moving import moved_to

        return [self._read(moved) for moved in moved_to(group, self.device)]

    def _read(self, inputs: _Batch) -> torch.Tensor:
        return self.read(self.encoder, inputs)

    def _forward(self, group: list[_Batch], act: Callable[[list[_Batch]], list[torch.Tensor]]) -> list[torch.Tensor]:
        """What the encoder makes of each batch of a group."""
        import torch

        for inputs in group:
            if "input_ids" in inputs and "attention_mask" not in inputs:
                raise RecipeError(
                    f"a batch of {self.task!r} has 'input_ids' without 'attention_mask', so padding would count as "
                    "text; let the tokenizer return the mask"
                )
        # In inference mode autocast would cast the weights anew for each batch.
        mode = torch.inference_mode if self.autocast == "float32" else torch.no_grad
        try:
            with mode(), _autocast(self.device, self.autocast):
                return act(group)
        except torch.OutOfMemoryError as error:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in group[0].items())
            raise OrthomergeError(
                f"{self.device} ran out of memory on inputs of {self.task!r} ({shapes}); give a smaller batch"
            ) from error

    def _fetch(
        self, parts: list[torch.Tensor], values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Event | None]:
        """Features on their way to the host, and the event that says that they are there.

        Into a tensor made outside of inference mode: those made inside can never be trained on.
        """
        import torch

        places, pinned = torch.cat(parts), self.device.type == "cuda"
        landing = torch.empty(len(places), values[0].shape[1], dtype=torch.float32, pin_memory=pinned)
        landing.copy_(torch.cat(values), non_blocking=pinned)
        if not pinned:
            return places, landing, None
        event = torch.Event(self.device)
        event.record()
        return places, landing, event

    def _landed(
        self, places: torch.Tensor, values: torch.Tensor, event: torch.Event | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if event is not None:
            event.synchronize()
        # A sum is finite only if all its terms are: one cheap pass, and a closer look where it is not.
        finite = None if math.isfinite(float(values.sum())) else values.isfinite().all(1)
        if finite is not None and not finite.all():
            row = int(places[~finite].min())
            cure = "check its weights" if self.autocast == "float32" else f"{self.autocast} may be too narrow for it"
            raise NumericalError(
                f"the encoder gives features that are not finite for row {row} of {self.task!r}; {cure}"
            )
        return places, values


@contextmanager
def _evaluating(encoder: object, device: torch.device) -> Iterator[None]:
    """A module on the device and in eval mode; each part gets its own mode back."""
    import torch

    if not isinstance(encoder, torch.nn.Module):
        yield
        return
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.to(device).eval()
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # of weights cast without gradient, should the caller train on under autocast
        for module, training in modes:
            module.training = training


def _shareable(*given: object) -> bool:
    from orthomerge.features.parts import shareable

    return shareable(*given)


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    import torch

    enabled = precision != "float32"
    return torch.autocast(device.type, dtype=getattr(torch, precision) if enabled else None, enabled=enabled)
