"""Classifiers that are more than a head, put together again from their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from orthomerge.core.errors import CheckpointError, nearest, some

if TYPE_CHECKING:
    import torch

    from orthomerge.alignment.aligner import Extra
    from orthomerge.models.heads import Head


def rebuilt(kind: str, head: Head, tensors: Mapping[str, torch.Tensor], *, where: Path) -> Extra:
    """The classifier of an aligner of the table that gives more than a head; `where` is for messages."""
    from orthomerge.alignment.aligners import aligners

    known = {name: row for name, row in aligners().items() if row.extra}
    if kind not in known:
        raise CheckpointError(
            f"{where} belongs to the aligner {kind!r:.80}, which this version does not know ({nearest(kind, known)}); "
            "update orthomerge, or align again"
        )
    odd = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if odd:
        raise CheckpointError(f"{where}: {some(odd)} must be in floating point; fetch the folder again, or align again")
    module = import_module(known[kind].maker.partition(":")[0])
    return cast("Extra", module.rebuild(head, tensors))
