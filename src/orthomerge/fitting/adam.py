"""Adam over one flat tensor, piece by piece, with moments no larger than asked for.

Kingma and Ba 2015, arXiv 1412.6980. Moments are kept in float32 (8 bytes an element), in bfloat16 (4) or in 8 bits in
blocks of 256 that share a scale (2); the narrow ones are rounded at random, up or down by how near, or a second moment
that changes by a thousandth a step would never change at all. Pieces keep what is computed on the way small, and on a
CPU in its cache.

Differs from the paper: epsilon is 1e-15. Gradients of a mask are of the order of 1e-8, where the usual one would decide
how far an element moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch

__all__ = ["FlatAdam", "Moments", "pieces"]

Moments = Literal["float32", "bfloat16", "int8"]

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-15
_BLOCK = 256
_PIECE = {"cpu": 1 << 16}
_LARGE_PIECE = 1 << 24


def pieces(size: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover a flat tensor."""
    step = _PIECE.get(device.type, _LARGE_PIECE)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


class FlatAdam:
    """The moments of `size` elements and the number of steps that they have seen."""

    def __init__(self, size: int, device: torch.device, *, moments: Moments = "float32", seed: int = 0) -> None:
        self._first, self._second = _store(moments, size, device), _store(moments, size, device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self.steps = 0

    def update(self, values: torch.Tensor, place: slice, gradient: torch.Tensor, lr: float) -> None:
        """Move `values[place]` against a gradient, as a part of the step that `begin` began."""
        first = self._first.read(place).lerp_(gradient, 1 - _BETA_1)
        second = self._second.read(place, root=True).mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
        self._first.write(place, first, self._generator)
        self._second.write(place, second, self._generator, root=True)
        size = lr / (1 - _BETA_1**self.steps)
        root = second.sqrt().div_(math.sqrt(1 - _BETA_2**self.steps)).add_(_EPSILON)
        values[place].addcdiv_(first, root, value=-size)

    def begin(self) -> None:
        """One step more."""
        self.steps += 1

    def step(self, values: torch.Tensor, gradient: Callable[[slice], torch.Tensor], lr: float) -> None:
        """A whole step over `values`."""
        self.begin()
        for place in pieces(len(values), values.device):
            self.update(values, place, gradient(place), lr)

    def state(self) -> dict[str, torch.Tensor | int]:
        """What a resumed run needs."""
        named = {"first": self._first, "second": self._second}
        found = {f"{name}.{key}": t for name, store in named.items() for key, t in store.tensors().items()}
        return {**found, "steps": self.steps, "generator": self._generator.get_state()}

    def load(self, state: dict[str, torch.Tensor | int]) -> None:
        for name, store in {"first": self._first, "second": self._second}.items():
            for key, tensor in store.tensors().items():
                tensor.copy_(torch.as_tensor(state[f"{name}.{key}"]))
        self.steps = int(state["steps"])
        self._generator.set_state(torch.as_tensor(state["generator"]).cpu())


def _store(moments: Moments, size: int, device: torch.device) -> _Wide | _Half | _Bytes:
    if moments == "float32":
        return _Wide(size, device)
    return _Half(size, device) if moments == "bfloat16" else _Bytes(size, device)


class _Wide:
    """Moments in float32, changed in place."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._values = torch.zeros(size, device=device)

    def read(self, place: slice, *, root: bool = False) -> torch.Tensor:
        return self._values[place]

    def write(self, place: slice, values: torch.Tensor, generator: torch.Generator, *, root: bool = False) -> None:
        """They are views of what is kept, and have been changed already."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"values": self._values}


class _Half:
    """Moments in bfloat16."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._values = torch.zeros(size, dtype=torch.bfloat16, device=device)

    def read(self, place: slice, *, root: bool = False) -> torch.Tensor:
        return self._values[place].float()

    def write(self, place: slice, values: torch.Tensor, generator: torch.Generator, *, root: bool = False) -> None:
        noise = torch.randint(0, 1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
        bits = values.contiguous().view(torch.int32).add(noise).bitwise_and_(-(1 << 16))
        self._values[place] = bits.view(torch.float32).to(torch.bfloat16)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"values": self._values}


class _Bytes:
    """Moments in 8 bits; of second moments (`root`) the root is kept, which has half the orders of magnitude."""

    def __init__(self, size: int, device: torch.device) -> None:
        blocks = -(-size // _BLOCK)
        self._values = torch.zeros(size, dtype=torch.int8, device=device)
        self._scales = torch.zeros(blocks, device=device)

    def read(self, place: slice, *, root: bool = False) -> torch.Tensor:
        scales = self._scales[self._blocks(place)].repeat_interleave(_BLOCK)[: place.stop - place.start]
        found = self._values[place].float().mul_(scales)
        return found.square_() if root else found

    def write(self, place: slice, values: torch.Tensor, generator: torch.Generator, *, root: bool = False) -> None:
        kept = values.sqrt() if root else values
        padded = torch.nn.functional.pad(kept, (0, -len(kept) % _BLOCK)).view(-1, _BLOCK)
        scales = padded.abs().amax(1).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
        noise = torch.rand(padded.shape, generator=generator, device=padded.device)
        whole = padded.div(scales[:, None]).add_(noise).floor_()
        if root:  # never zero for what is not: it divides
            whole.clamp_min_(1).mul_(padded > 0)
        self._values[place] = whole.clamp_(-127, 127).to(torch.int8).view(-1)[: len(kept)]
        self._scales[self._blocks(place)] = scales

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"values": self._values, "scales": self._scales}

    @staticmethod
    def _blocks(place: slice) -> slice:
        return slice(place.start // _BLOCK, -(-place.stop // _BLOCK))
