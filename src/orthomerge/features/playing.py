"""The forward passes of a small encoder on a GPU: recorded for a shape that comes often, and then played back.

A small encoder takes a hundred launches a batch, and Python needs longer to ask for them than the GPU to do them. So
texts are padded to one of a few lengths, and batches of one shape are recorded once, as a CUDA graph; playing it is one
launch. Nothing is recorded of an encoder that is large (it keeps the GPU busy as it is), that has hooks (which would be
called once and never again), or that cannot be recorded (it looks at its own numbers); nor of a shape that comes too
seldom to be worth it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from orthomerge.features.moving import moved_to

__all__ = ["Player", "recordable", "rounded", "width_of"]

Batch = Mapping[str, torch.Tensor]
_Shape = tuple[tuple[str, torch.Size, torch.dtype], ...]

_SMALL = 1 << 27  # parameters of an encoder that is worth it
_OFTEN = 3  # batches of a shape, of those that are sent together, that are worth a recording
_MOST = 64  # recordings that are kept
_STEP = 8  # tokens that lengths differ by
_OFFSET = 2  # position embeddings that some models begin their count after


def recordable(encoder: object, device: torch.device) -> bool:
    """Whether passes of an encoder may be recorded."""
    if device.type != "cuda" or not isinstance(encoder, torch.nn.Module):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules()):  # noqa: SLF001
        return False
    return sum(parameter.numel() for parameter in encoder.parameters()) <= _SMALL


def width_of(encoder: object) -> int:
    """The most tokens that texts may be padded to; 0 where nothing is known of the encoder."""
    config: Any = getattr(encoder, "config", None)
    if config is None:
        return 0
    places = getattr(config, "max_position_embeddings", None)
    return places - _OFFSET if isinstance(places, int) else 1 << 30


def rounded(inputs: Batch, most: int) -> Batch:
    """Texts padded at their ends to a length that others have too; those that begin with padding stay as they are."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or not mask.shape[1] or not bool((mask[:, 0] != 0).all()):
        return inputs
    missing = -mask.shape[1] % _STEP
    if not missing or mask.shape[1] + missing > most or any(each.shape != mask.shape for each in inputs.values()):
        return inputs
    return {name: pad(tensor, (0, missing)) for name, tensor in inputs.items()}


@dataclass(frozen=True)
class _Recording:
    """A graph, where it reads its inputs and where it leaves its features."""

    graph: torch.cuda.CUDAGraph
    given: Batch
    found: torch.Tensor

    def play(self, inputs: Batch) -> torch.Tensor:
        for name, tensor in inputs.items():
            self.given[name].copy_(tensor)
        self.graph.replay()
        return self.found.clone()


class Player:
    """`act`: the features of a batch that lies on the device, under the encoder's present weights.

    `width`: the most tokens that texts may be padded to.
    """

    def __init__(self, act: Callable[[Batch], torch.Tensor], device: torch.device, *, width: int = 0) -> None:
        self._act, self._width, self._device = act, width, device
        self._recordings: dict[_Shape, _Recording] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._warm = self._failed = False

    def __call__(self, group: Sequence[Batch]) -> list[torch.Tensor]:
        """Features of every batch of a group, in order."""
        group = [rounded(inputs, self._width) for inputs in group]
        shapes = [_shape(inputs) for inputs in group]
        often = {shape for shape, count in Counter(shapes).items() if count >= _OFTEN}
        moved = moved_to(group, self._device)
        return [self._one(shape, inputs, shape in often) for shape, inputs in zip(shapes, moved, strict=True)]

    def _one(self, shape: _Shape, inputs: Batch, often: bool) -> torch.Tensor:
        known = self._recordings.get(shape)
        if known is None and often and self._warm and not self._failed and len(self._recordings) < _MOST:
            known = self._recorded(shape, inputs)
        if known is not None:
            return known.play(inputs)
        self._warm = True  # libraries have what they make at their first use
        return self._act(inputs)

    def _recorded(self, shape: _Shape, inputs: Batch) -> _Recording | None:
        graph, given = torch.cuda.CUDAGraph(), {name: tensor.clone() for name, tensor in inputs.items()}
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _uncached():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    found = self._act(given)
                finally:
                    graph.capture_end()
        except RuntimeError:  # out of memory too: a recording has memory of its own
            self._failed = True
            torch.cuda.synchronize(self._device)
            return None
        current.wait_stream(self._stream)
        self._recordings[shape] = _Recording(graph, given, found)
        return self._recordings[shape]


@contextmanager
def _uncached() -> Iterator[None]:
    """Weights that autocast casts are cast in the recording: those that it keeps may be gone when it is played."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _shape(inputs: Batch) -> _Shape:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
