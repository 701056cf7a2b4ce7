"""The main job: from a recipe to a folder with one encoder and all its heads."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from orthomerge.checkpoints.checkpoint import Checkpoint, is_float, torch_dtype
from orthomerge.checkpoints.lora import Adapter, AdapterSource
from orthomerge.checkpoints.publish import check_target
from orthomerge.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError
from orthomerge.heads import Head, Linear
from orthomerge.merging.expressions import evaluate
from orthomerge.merging.vectors import TILE, Difference, TaskVector, TaskVectors
from orthomerge.models.split import TIED
from orthomerge.models.weights import EncoderWeights
from orthomerge.output import write_output
from orthomerge.planning import ExpertPlan, Job, make_plan
from orthomerge.recipe import HeadNames, Recipe

if TYPE_CHECKING:
    import torch

    from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod, Vectors

__all__ = [
    "Progress",
    "Result",
    "check_tied",
    "copied_tensor",
    "encoder_blocks",
    "heads_of",
    "merge",
    "prepared",
    "task_vectors",
]

_SHARES = (1, 8)  # by how much blocks shrink when memory runs out


class Progress(Protocol):
    """Whoever wants to know how far the work is."""

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


class _Silent:
    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


@dataclass(frozen=True)
class Result:
    """What a merge made."""

    out: Path
    manifest: dict[str, Any]


def merge(
    recipe: Recipe, *, out: str | Path | None = None, force: bool = False, progress: Progress | None = None
) -> Result:
    """Carry out a recipe up to the model. Either the whole output folder is there afterwards, or nothing of it."""
    target, recipe = out or recipe.out, recipe.merging
    if target is None:
        raise RecipeError("where to? Give 'out' in the recipe, or --out")
    if recipe.align is not None:
        from orthomerge.aligning import merge_aligned

        return merge_aligned(recipe, to=target, force=force, progress=progress)
    if recipe.fit is not None:
        from orthomerge.fitted import merge_fitted

        return merge_fitted(recipe, to=target, force=force, progress=progress)
    job = make_plan(replace(recipe, out=str(target))).check()
    check_target(Path(target), force=force, inputs=[source.path for source in job.sources.values()])  # before any work
    from orthomerge.kinship import check_kinship
    from orthomerge.merging.stream import MEMORY, is_out_of_memory

    heads = heads_of(job)
    check_tied(job)
    vectors = task_vectors(job)
    check_kinship(job, vectors)
    reporter = progress or _Silent()
    # Tiles change no bit of the result; when memory runs out, smaller ones are tried once.
    for share in _SHARES:
        tiles = replace(vectors, tile=max(TILE // share, 1))
        try:
            return _carry_out(job, heads, tiles, Path(target), force=force, memory=MEMORY // share, reporter=reporter)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
    raise OrthomergeError(
        f"there is not enough memory to merge {len(job.experts)} experts into {target}, even in blocks an eighth as "
        "large; nothing was left behind: close other programs, or use a method that does not need whole matrices, "
        "such as task_arithmetic"
    )


def _carry_out(
    job: Job, heads: dict[str, Head], vectors: TaskVectors, out: Path, *, force: bool, memory: int, reporter: Progress
) -> Result:
    if hasattr(job.method, "survey"):
        reporter.stage("surveying", None)
    method = prepared(job, vectors)
    reporter.stage("merging", job.bytes_to_write)
    with closing(encoder_blocks(job, vectors, method, memory=memory)) as stream:
        manifest = write_output(job, heads, stream, out=out, force=force, progress=reporter.advance)
    return Result(out, manifest)


def prepared(job: Job, vectors: TaskVectors) -> TensorMethod:
    """The job's method, after its look at everything where it takes one."""
    from orthomerge.merging.stream import prepare

    seen = vectors if job.recipe.device == "cpu" else _seen_there(job, vectors)
    return prepare(cast("TensorMethod | SurveyMethod", job.method), seen)


def _seen_there(job: Job, vectors: TaskVectors) -> Vectors:
    from orthomerge.features.extract import device_of
    from orthomerge.merging.device import SeenThere

    return SeenThere(vectors, device_of(job.recipe.device))


def encoder_blocks(
    job: Job, vectors: TaskVectors, method: TensorMethod, *, memory: int
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The merged encoder in the order of writing; close it."""
    from orthomerge.merging.stream import MEMORY, merge_blocks

    workers = None if memory == MEMORY else 1
    if job.recipe.device != "cpu":
        from orthomerge.features.extract import device_of
        from orthomerge.merging.device import LARGER, OnDevice

        method, memory = OnDevice(method, device_of(job.recipe.device)), LARGER * memory

    def finish(block: Block, weights: torch.Tensor) -> tuple[str, torch.Tensor]:
        return _cast(job, block, weights)

    with closing(merge_blocks(vectors, method, finish, workers=workers, memory=memory)) as merged:
        for key in job.specs:
            if key in job.copied:
                yield key, copied_tensor(job, key)
                continue
            left = job.specs[key].numel
            while left:
                found, weights = next(merged)
                left -= weights.numel()
                yield found, weights


def task_vectors(job: Job) -> TaskVectors:
    """The job's task vectors, lazy; with a `vector` expression, the one that it stands for."""
    merged = [key for key in job.specs if key in job.merged]
    base = EncoderWeights(job.base, {key: job.base_split.names[key] for key in merged})
    vectors = {task: TaskVector(base, ((1.0, _source(expert, merged)),)) for task, expert in job.experts.items()}
    if job.recipe.vector is not None:
        vectors = {"vector": evaluate(job.recipe.vector, vectors)}
    return TaskVectors(vectors)


def _source(expert: ExpertPlan, merged: list[str]) -> Difference | AdapterSource:
    names = expert.split.names
    if isinstance(expert.source, Adapter):
        return AdapterSource(expert.source, names)
    tuned = EncoderWeights(expert.source, names)
    return Difference(tuned, frozenset(key for key in merged if key not in names))


def heads_of(job: Job) -> dict[str, Head]:
    """Every task's head, read now: heads are small."""
    return {task: _head(job, expert) for task, expert in job.experts.items()}


def _head(job: Job, expert: ExpertPlan) -> Head:
    if expert.layout is None:
        from orthomerge.models.zero_shot import zero_shot_head

        templates = expert.given.head.templates if expert.given.head else HeadNames().templates
        return zero_shot_head(job.base.path, expert.labels, templates)
    names = expert.split.head
    parts = {part: _tensor(expert, name) for part, name in names.items()}
    hidden = Linear(parts["hidden.weight"], parts.get("hidden.bias")) if "hidden.weight" in parts else None
    return Head(
        Linear(parts["weight"], parts.get("bias")),
        expert.labels,
        hidden,
        expert.layout.activation if hidden is not None else None,
        expert.layout.normalise,
    )


def _tensor(expert: ExpertPlan, name: str) -> torch.Tensor:
    import torch

    source = expert.source
    entry = source.entry(name) if isinstance(source, Checkpoint) else source.replaced[name]
    tensor = entry.read(0, entry.spec.numel).reshape(entry.spec.shape)
    if not torch.isfinite(tensor.float()).all():
        raise NumericalError(f"{entry.file.path}: the head's {name!r} holds NaN or infinity; find a sound checkpoint")
    return tensor


def check_tied(job: Job) -> None:
    """Weights under two names must be the same under both; of two that differ, nobody can say which counts."""
    import torch

    splits = [(job.base, job.base_split), *((expert.source, expert.split) for expert in job.experts.values())]
    for source, split in splits:
        for name, why in split.left_out.items():
            twin = split.names.get(why.removeprefix(TIED)) if why.startswith(TIED) else None
            if twin is None or not isinstance(source, Checkpoint) or source.entry(name) == source.entry(twin):
                continue
            count = source.spec(name).numel
            for start in range(0, count, TILE):
                stop = min(start + TILE, count)
                if not torch.equal(source.read(name, start, stop), source.read(twin, start, stop)):
                    raise IncompatibleError(
                        f"{source.path}: {name!r} and {twin!r} must be one tensor and differ from element {start} on; "
                        "save the model again with the stock class, which ties them"
                    )


def _cast(job: Job, block: Block, weights: torch.Tensor) -> tuple[str, torch.Tensor]:
    """To the dtype of the output, once; what does not fit is an error."""
    import torch

    key = block.site.key
    cast = weights.to(torch_dtype(job.specs[key].dtype))
    if not torch.isfinite(cast.float().sum()) and not torch.isfinite(cast.float()).all():
        largest = float(weights.abs().max())
        raise NumericalError(
            f"{key!r} does not fit into {job.specs[key].dtype} after the merge (largest magnitude {largest:.3g}); "
            "use a smaller scale, or --dtype float32 or bfloat16"
        )
    return key, cast.reshape(-1)


def copied_tensor(job: Job, key: str) -> torch.Tensor:
    """A tensor of the base as it is; integer buffers must be the same in every expert that has them."""
    import torch

    spec = job.specs[key]
    tensor = job.base.read(job.base_split.names[key], 0, spec.numel)
    for task, expert in job.experts.items():
        name = expert.split.names.get(key)
        if is_float(spec.dtype) or name is None or not isinstance(expert.source, Checkpoint):
            continue
        if not torch.equal(tensor, expert.source.read(name, 0, spec.numel).to(tensor.dtype)):
            raise IncompatibleError(
                f"the integer buffer {key!r} differs between the base and expert {task!r} "
                f"({expert.source.origin(name)}); such tensors cannot be merged: use experts of the same base"
            )
    cast = tensor.to(torch_dtype(spec.dtype))
    if is_float(spec.dtype) and not torch.isfinite(cast.float()).all():
        name = job.base_split.names[key]
        raise NumericalError(
            f"{name!r} in the base ({job.base.origin(name)}) holds NaN or infinity, or does not fit into {spec.dtype}; "
            "find a sound checkpoint, or list it under 'ignore'"
        )
    return cast
