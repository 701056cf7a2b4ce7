"""Flat layout: all weights of an encoder in one tensor.

Names are those of the module's parameters, except where they are called canonical.

Letters: P elements. Tensors start at multiples of `_ALIGNED` elements, with zeros in the gaps.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from orthomerge.core.errors import IncompatibleError, NumericalError, some
from orthomerge.files.checkpoint import Spec, torch_dtype
from orthomerge.models.tensors import Tensors

_ALIGNED = 64


@dataclass(frozen=True)
class Layout:
    """Names and shapes of an encoder's floating-point parameters, in order."""

    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def places(self) -> dict[str, slice]:
        places, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            places[name] = slice(start, start + size)
            start += -(-size // _ALIGNED) * _ALIGNED
        return places

    @property
    def elements(self) -> int:
        """Number of parameters: P without gaps."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def size(self) -> int:
        last = max((place.stop for place in self.places.values()), default=0)
        return -(-last // _ALIGNED) * _ALIGNED

    def flat(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Concatenate tensors by name to [P], in float32 on the CPU; other names are ignored."""
        _check_complete([name for name in self.shapes if name not in tensors])
        flat = torch.zeros(self.size)
        for name, place in self.places.items():
            flat[place] = tensors[name].detach().reshape(-1).float().cpu()
        return flat

    def views(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the views of a flat tensor by name; leading dimensions of `flat` are kept."""
        for name, place in self.places.items():
            yield name, flat[..., place].view((*flat.shape[:-1], *self.shapes[name]))


class FlatEncoder:
    """An encoder whose parameters are views of `weights` [P], and their gradients views of `gradient` [P].

    It runs in eval mode. `names`: canonical name -> name in the module; None if they are the same.
    """

    def __init__(
        self,
        encoder: nn.Module,
        pool: Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor],
        device: torch.device,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.device, self._pool = encoder.to(device, torch.float32).eval(), device, pool
        parameters = dict(encoder.named_parameters())
        self.layout = Layout({name: tuple(parameter.shape) for name, parameter in parameters.items()})
        named = dict(zip(parameters, parameters, strict=True)) if names is None else names
        self.names = {key: name for key, name in named.items() if name in parameters}
        self.weights = self.layout.flat(parameters).to(device)
        self.gradient = torch.zeros_like(self.weights)
        gradients = dict(self.layout.views(self.gradient))
        for name, view in self.layout.views(self.weights):
            parameters[name].data, parameters[name].grad = view, gradients[name]
            parameters[name].requires_grad_(True)

    def features(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._pool(self.module, batch)

    def load(self, weights: torch.Tensor) -> None:
        with torch.no_grad():
            self.weights.copy_(weights)

    def flat(self, tensors: Tensors) -> torch.Tensor:
        """Read the parameters [P] from a stream of tensors, in float32 on the CPU."""
        flat = torch.zeros(self.layout.size)
        ends = {name: place.start for name, place in self.layout.places.items()}
        for key, block in tensors.blocks():
            if key in self.names:
                start = ends[self.names[key]]
                flat[start : start + block.numel()] = block.reshape(-1)
                ends[self.names[key]] = start + block.numel()
        _check_complete([name for name, place in self.layout.places.items() if ends[name] != place.stop])
        return flat

    def tensors(self, weights: torch.Tensor, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
        """Return the parameters in `specs` from [P], by canonical name and in its dtypes."""
        views, tensors = dict(self.layout.views(weights)), {}
        for key, spec in specs.items():
            if key not in self.names:
                continue
            view = views[self.names[key]]
            tensors[key] = view.to(torch_dtype(spec.dtype))
            if not torch.isfinite(tensors[key].float()).all():
                raise NumericalError(
                    f"{key!r} does not fit into {spec.dtype} after the fit (largest magnitude "
                    f"{float(view.abs().max()):.3g}); use --dtype float32 or bfloat16, or lower 'lr'"
                )
        return tensors


def _check_complete(missing: list[str]) -> None:
    if missing:
        raise IncompatibleError(f"weights of {some(missing)} are missing; all experts must have the same architecture")
