"""Classifiers that are more than a head, and how they are rebuilt from the tensors kept beside a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.core.errors import CheckpointError, nearest, some

if TYPE_CHECKING:
    import torch

    from orthomerge.models.heads import Extra, Head

    Rebuild = Callable[[Head, Mapping[str, torch.Tensor]], Extra]


@dataclass(frozen=True, eq=False)
class SurgeryHead:
    """A head behind f - U relu(D f): `down` is D [r, d], `up` is U [d, r] (Yang et al. 2024, arXiv 2402.02705)."""

    head: Head
    down: torch.Tensor
    up: torch.Tensor
    kind: str = "surgery"

    @property
    def labels(self) -> tuple[str, ...]:
        return self.head.labels

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(features - (features @ self.down.T).relu() @ self.up.T)

    def extra_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor beyond the head's, by name."""
        return {"down": self.down, "up": self.up}


def rebuild_surgery(head: Head, tensors: Mapping[str, torch.Tensor], *, kind: str = "surgery") -> SurgeryHead:
    """Build the classifier from a head and the saved tensors."""
    if set(tensors) != {"down", "up"}:
        raise CheckpointError(f"a {kind} module must hold 'down' and 'up', got {sorted(tensors)}; align again")
    down, up = tensors["down"], tensors["up"]
    if down.ndim != 2 or down.shape[1] != head.width or up.shape != down.shape[::-1]:
        raise CheckpointError(
            f"a {kind} module before a head of width {head.width} must have 'down' [r, {head.width}] and 'up' "
            f"[{head.width}, r], got {tuple(down.shape)} and {tuple(up.shape)}; align again"
        )
    return SurgeryHead(head, down, up, kind)


def rebuilt(kind: str, head: Head, tensors: Mapping[str, torch.Tensor], *, where: Path) -> Extra:
    """Build the classifier of an aligner that adds a module to a head; `where` is for messages."""
    if kind not in _rebuilders():
        raise CheckpointError(
            f"{where} belongs to the aligner {kind!r:.80}, which this version does not know "
            f"({nearest(kind, _rebuilders())}); update orthomerge, or align again"
        )
    odd = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if odd:
        raise CheckpointError(f"{where}: {some(odd)} must be in floating point; fetch the folder again, or align again")
    return _rebuilders()[kind](head, tensors)


@cache
def _rebuilders() -> Mapping[str, Rebuild]:
    """Functions by the aligner's name; the module of a plug-in aligner with `extra` has one called `rebuild`."""
    rows = [entry.load() for entry in entry_points(group="orthomerge.aligners")]
    plugins = {row.name: import_module(row.maker.partition(":")[0]).rebuild for row in rows if row.extra}
    return {**plugins, **{kind: partial(rebuild_surgery, kind=kind) for kind in ("surgery", "probsurgery")}}
