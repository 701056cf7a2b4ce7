"""Batches on their way to a device, several by one transfer where they are small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

__all__ = ["moved_to"]

_Batch = Mapping[str, torch.Tensor]

_MOST = 1 << 24  # bytes of inputs that are sent together; what is larger is worth a transfer of its own


def moved_to(group: Sequence[_Batch], device: torch.device) -> Iterator[_Batch]:
    """Batches on the device: small ones by one transfer."""
    if (
        device.type == "cuda"
        and (flat := _flat([tensor for inputs in group for tensor in inputs.values()])) is not None
    ):
        there, start = flat.to(device, non_blocking=True), 0
        for inputs in group:
            found = {}
            for name, tensor in inputs.items():
                found[name] = there[start : start + tensor.numel()].view(tensor.shape)
                start += tensor.numel()
            yield found
        return
    for inputs in group:
        ready = {name: t.pin_memory() if device.type == "cuda" and t.is_cpu else t for name, t in inputs.items()}
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in ready.items()}


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Small tensors of one kind behind each other, in memory that a GPU can fetch them from by itself."""
    size = sum(tensor.numel() for tensor in tensors)
    kind = tensors[0].dtype
    if size * kind.itemsize > _MOST or not all(tensor.is_cpu and tensor.dtype == kind for tensor in tensors):
        return None
    found = torch.empty(size, dtype=kind, pin_memory=True)
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=found)
