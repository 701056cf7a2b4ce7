"""An encoder of which every process holds a part: for one that does not fit, with its gates and moments, into one.

Layers are put under `torch.distributed.fsdp.fully_shard` one by one, then the rest. A process has some rows of every
parameter, behind each other in `weights` [p], with about p = P / N; gates are over these alone. A pass gathers the
weights of a layer, uses and drops them; the backward pass adds up gradients and leaves each process its rows.

Letters: P elements of the encoder, p of this process's shard, N processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from orthomerge.distributed.group import Group
from orthomerge.errors import IncompatibleError, some
from orthomerge.fitting.layout import Layout

__all__ = ["ShardedEncoder"]

Pool = Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]


class ShardedEncoder:
    """What `FlatEncoder` is, over this process's shard of the weights. All processes must make the same passes.

    `layout` is that of the whole encoder. `shards`: the processes that hold it together.
    """

    def __init__(self, encoder: nn.Module, pool: Pool, device: torch.device, group: Group) -> None:
        self.layout, self.device, self.shards = Layout.of(encoder), device, group
        flat = [name for name, shape in self.layout.shapes.items() if not shape]
        if flat:
            raise IncompatibleError(f"{some(flat)} are single numbers, which cannot be sharded; leave 'sharded' out")
        self.module = encoder.float().eval().requires_grad_(True)
        self._pool = pool
        self._root = _Pooled(self.module, lambda module, batch: self._pool(module, batch))  # noqa: PLW0108 - looked up late
        _shard(self._root, self.module, device, group)
        self._parameters: dict[str, Any] = dict(self.module.named_parameters())
        self.weights = torch.cat([each.to_local().detach().reshape(-1) for each in self._parameters.values()])
        self.gradient = torch.zeros_like(self.weights)

    def features(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the heads read, [B, d], with the weights as they are now."""
        with torch.no_grad():
            for parameter, values in self._views(self.weights):
                parameter.to_local().copy_(values)
        return cast("torch.Tensor", self._root(batch))

    def clear(self) -> None:
        """Forget the gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def collect(self, group: Group) -> None:
        """Bring what the backward pass has added up to `gradient`, and nowhere else."""
        for parameter, gradient in self._views(self.gradient):
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad.to_local())
                parameter.grad = None

    def load(self, weights: torch.Tensor) -> None:
        """Other weights, [p]."""
        with torch.no_grad():
            self.weights.copy_(weights)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The shard [p] that this process has of weights [P]."""
        parts = [self._rows(view)[self.shards.rank].reshape(-1) for _, view in self.layout.views(whole)]
        return torch.cat(parts)

    def whole(self) -> torch.Tensor:
        """All weights [P] on the CPU of the first process; elsewhere nothing. All must call it."""
        found = torch.zeros(0 if self.shards.rank else self.layout.size)
        places = iter(self.layout.places.values())
        for _, values in self._views(self.weights):
            parts, place = self.shards.gather(values.reshape(-1), everywhere=False), next(places)
            if parts:
                found[place] = torch.cat(parts)
        return found

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
        """Every parameter with its rows in a flat tensor [p]."""
        start = 0
        for parameter in self._parameters.values():
            shape = parameter.to_local().shape
            size = math.prod(shape)
            yield parameter, flat[start : start + size].view(shape)
            start += size

    def _rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each process, as `fully_shard` deals them out: the last ones may get fewer, or none."""
        parts = list(tensor.chunk(self.shards.world))
        return parts + [tensor[:0]] * (self.shards.world - len(parts))


class _Pooled(nn.Module):
    """The encoder with how it is read: whatever part of it that calls, weights are gathered first."""

    def __init__(self, encoder: nn.Module, pool: Pool) -> None:
        super().__init__()
        self.encoder, self._pool = encoder, pool

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._pool(self.encoder, batch)


def _shard(root: nn.Module, encoder: nn.Module, device: torch.device, group: Group) -> None:
    """Gradients are to be summed: what processes pass is weighted already (`passes`)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (group.world,))
    for layer in _layers(encoder):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(root, mesh=mesh, reshard_after_forward=True)  # and again for the next pass, which has other weights
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root.to(device)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """What a list of modules holds; of lists inside of each other, the outermost's."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from _layers(child)
