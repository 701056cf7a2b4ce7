"""Reading an expert's own head: small, so it is read whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orthomerge.core.errors import NumericalError
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.models.heads import Head, Linear
from orthomerge.models.opening import HeadNames

if TYPE_CHECKING:
    import torch

    from orthomerge.models.experts import Source
    from orthomerge.models.family import Family


def is_zero_shot(source: Source) -> bool:
    """Whether the head is made from class names, and so not in the expert's checkpoint."""
    return source.layout is None


def read_head(base: Checkpoint, source: Source, family: Family) -> Head:
    """The head of an expert, in the dtype in which it is stored."""
    if is_zero_shot(source):
        from orthomerge.models.zero_shot import zero_shot_head

        templates = source.given.head.templates if source.given.head else HeadNames().templates
        head = zero_shot_head(base.path, source.labels, templates)
        return Head(head.output, head.labels, normalise=head.normalise, pooling=source.pooling)
    parts = {part: _tensor(source, name) for part, name in source.split.head.items()}
    hidden = Linear(parts["hidden.weight"], parts.get("hidden.bias")) if "hidden.weight" in parts else None
    layout = source.layout
    assert layout is not None  # noqa: S101 - for mypy: only a zero-shot head has none
    return Head(
        Linear(parts["weight"], parts.get("bias")),
        source.labels,
        hidden,
        layout.activation if hidden is not None else None,
        layout.normalise,
        pooling=source.pooling,
        max_length=source.max_length,
    )


def _tensor(source: Source, name: str) -> torch.Tensor:
    import torch

    checkpoint = source.checkpoint
    entry = checkpoint.entry(name) if isinstance(checkpoint, Checkpoint) else checkpoint.replaced[name]
    tensor = entry.read(0, entry.spec.numel).reshape(entry.spec.shape)
    if not torch.isfinite(tensor.float()).all():
        raise NumericalError(f"{entry.file.path}: the head's {name!r} holds NaN or infinity; find a sound checkpoint")
    return tensor
