"""Sums over one part of a task's inputs: all that an aligner in closed form needs of them, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.aligning import Aligning
from orthomerge.checkpoints.checkpoint import DTYPES, Spec
from orthomerge.checkpoints.safetensors import read_safetensors
from orthomerge.checkpoints.shards import write_shard
from orthomerge.errors import RecipeError
from orthomerge.running.jobs.context import MODEL, Context

if TYPE_CHECKING:
    import torch

    from orthomerge.alignment.sums import Sums

__all__ = ["aligning", "read_sums", "statistics"]

_FILE, _SAMPLE = "sums.safetensors", "sample"
_PARTS = ("sum_h", "sum_t", "C", "S", "tt")


def statistics(context: Context, folder: Path) -> None:
    """Encode inputs `start` to `stop` by merge and expert, and add up what the head reads of them."""
    spec = context.job.spec
    run, task = aligning(context, spec["task"]), spec["task"]
    (expert,) = context.needed("expert")
    head = run.head(task, expert / MODEL)
    sums, sample = run.sums(task, expert / MODEL, head, start=spec["start"], stop=spec["stop"])
    write_sums(folder, sums, sample)


def aligning(context: Context, *tasks: str) -> Aligning:
    """The alignment of the merge that jobs made, for some tasks."""
    block = context.recipe.align
    if block is None:
        raise RecipeError("the recipe has no block 'align', but the plan aligns; plan again")
    data = {task: block.data[task] for task in tasks}
    context.check_data(data.values())
    return Aligning(context.places.merged, context.recipe, block, data)


def write_sums(folder: Path, sums: Sums, sample: torch.Tensor) -> None:
    """Folds by number, and some merged features on which a head can be tried."""
    import torch

    tensors = {_SAMPLE: sample.contiguous()}
    for number, part in enumerate(sums.parts):
        tensors[f"{number}.n"] = torch.tensor(part.n)
        tensors |= {f"{number}.{name}": getattr(part, name).contiguous() for name in _PARTS}
    names = {dtype: short for short, (_, dtype) in DTYPES.items()}
    specs = {
        name: Spec(tuple(tensor.shape), names[str(tensor.dtype).removeprefix("torch.")])
        for name, tensor in tensors.items()
    }
    order = dict(sorted(specs.items(), key=lambda item: (-DTYPES[item[1].dtype][0], item[0])))
    write_shard(folder / _FILE, order, ((name, tensors[name]) for name in order))


def read_sums(folder: Path, task: str) -> tuple[Sums, torch.Tensor]:
    """What `statistics` wrote."""
    from orthomerge.alignment.sums import FOLDS, Sums
    from orthomerge.features.statistics import Moments

    entries = read_safetensors(folder / _FILE)
    tensors = {name: entry.read(0, entry.spec.numel).reshape(entry.spec.shape) for name, entry in entries.items()}
    folds = (
        Moments(int(tensors[f"{number}.n"]), *(tensors[f"{number}.{name}"] for name in _PARTS))
        for number in range(FOLDS)
    )
    return Sums(tuple(folds), task), tensors[_SAMPLE]
