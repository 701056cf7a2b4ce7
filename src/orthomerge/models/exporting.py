"""One task as an ordinary transformers classifier folder, with all weights in one file (or the usual shards)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError
from orthomerge.core.sizes import parse_size
from orthomerge.core.version import VERSION
from orthomerge.files.checkpoint import DTYPES, Spec, torch_dtype
from orthomerge.files.ownership import EXPORT, write_marker
from orthomerge.files.publish import publish, write_json
from orthomerge.files.shards import write_shards
from orthomerge.models.config import classifier_config
from orthomerge.models.heads import Head
from orthomerge.models.stock import named_tensors, why_not_stock
from orthomerge.models.writing import main_dtype

if TYPE_CHECKING:
    import torch

    from orthomerge.models.model import Model


_WAY_OUT = "use orthomerge.load, which computes every head"


def export(model: Model, task: str, out: Path, *, force: bool = False, inputs: tuple[Path, ...] = ()) -> None:
    """Write one task as a folder that its stock class loads. `inputs`: what `out` must not overlap."""
    head, family = model.head(task), model.family
    why = why_not_stock(family, head)
    if why is not None or not isinstance(head, Head):
        raise RecipeError(f"no stock class computes what the head of {task!r} does: {why}; {_WAY_OUT}")
    encoder = {family.prefix + key: spec for key, spec in model.weights.specs.items()}
    dtype = main_dtype(encoder.values())
    tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in named_tensors(family, head).items()}
    specs = {**encoder, **{name: Spec(tuple(tensor.shape), dtype) for name, tensor in tensors.items()}}

    def blocks() -> Iterator[tuple[str, torch.Tensor]]:
        for key, block in model.weights.blocks():
            yield family.prefix + key, block
        yield from tensors.items()

    need = sum(spec.nbytes for spec in specs.values())
    config = classifier_config(model.config, family, head.labels, DTYPES[dtype][1])
    with publish(out, force=force, need=need, inputs=inputs, marker=EXPORT) as folder:
        write_shards(folder, specs, blocks(), most=parse_size("5GB"))
        model.processor.write(folder)
        write_json(folder / "config.json", config)
        write_marker(folder, EXPORT, orthomerge=VERSION, task=task, model=model.digest)
