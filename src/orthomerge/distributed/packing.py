"""Objects between processes with their tensors apart: a model is sent tensor by tensor and is never in memory twice.

Only the processes of one run talk to each other this way, over connections of their own.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Packed", "pack", "unpack"]


@dataclass(frozen=True)
class Packed:
    """`data`: the object without its tensors. `trained`: of each tensor, None or what its `requires_grad` was."""

    data: bytes
    trained: tuple[bool | None, ...]
    tensors: list[torch.Tensor] = field(default_factory=list, compare=False)


def pack(value: object, *, whole: bool = True) -> Packed:
    """Tensors that are shared inside of the object stay shared; `whole=False` leaves them out, to see if it works."""
    import torch

    numbers: dict[int, int] = {}
    found: list[torch.Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> int | None:
            if not isinstance(item, torch.Tensor):
                return None
            if id(item) not in numbers:
                numbers[id(item)] = len(found)
                found.append(item)
            return numbers[id(item)]

    file = io.BytesIO()
    Pickler(file).dump(value)
    kinds = tuple(each.requires_grad if isinstance(each, torch.nn.Parameter) else None for each in found)
    return Packed(file.getvalue(), kinds, [each.detach().cpu().contiguous() for each in found if whole])


def unpack(packed: Packed) -> Any:
    """The object; parameters of modules are parameters again."""
    import torch

    tensors = [
        tensor if trained is None else torch.nn.Parameter(tensor, requires_grad=trained)
        for tensor, trained in zip(packed.tensors, packed.trained, strict=True)
    ]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return tensors[pid]

    return Unpickler(io.BytesIO(packed.data)).load()
