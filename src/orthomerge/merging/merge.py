"""Merge opened experts by a method that needs no inputs, as lazy tensors."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from orthomerge.core.device import device_of, enough_memory, fixed_threads
from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError
from orthomerge.core.schema import schema
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float, torch_dtype
from orthomerge.files.lora import Adapter
from orthomerge.merging.checks import check_origin, check_tied
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod
from orthomerge.merging.methods import known_method, make_method, methods, name_of, options_of
from orthomerge.merging.stream import MEMORY, merge_blocks, prepare
from orthomerge.merging.vectors import Difference, TaskVector, TaskVectors, evaluate
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.models.model_data import Origin
from orthomerge.models.problems import Problem, check_problems
from orthomerge.models.split import Source
from orthomerge.models.tensors import FileTensors, in_writing_order
from orthomerge.models.writing import plain

DTYPE_NAMES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
_LARGER = 32  # factor of the memory for blocks on a device, which are whole matrices


def merge_opened(
    experts: Experts,
    method: Any,
    options: Mapping[str, Any],
    *,
    dtype: str = "keep",
    seed: int = 0,
    device: str = "cpu",
    vector: str | None = None,
) -> Model:
    """Merge by a method that needs no inputs; `method`: its name, with `options`, or an object."""
    name, chosen, used = chosen_method(experts, method, options, seed=seed, vector=vector)
    check_merge(experts, name, device=device, vector=vector)
    if hasattr(chosen, "fit"):
        raise RecipeError(f"{name!r} is fitted to inputs: give them as 'data' (--data TASK=PATH for every expert)")
    tensors = MergedTensors(experts, chosen, None if dtype == "keep" else dtype, vector, device)
    return experts.model(tensors, experts.heads, origin_of(experts, name, used, seed=seed, vector=vector))


def chosen_method(
    experts: Experts, method: Any, options: Mapping[str, Any], *, seed: int, vector: str | None = None
) -> tuple[str, Any, dict[str, Any]]:
    if isinstance(method, str):
        tasks = experts.tasks if vector is None else ("vector",)
        chosen = make_method(method, options, tasks=tasks, seed=seed)
        return method, chosen, options_of(chosen, method, options, tasks=tasks, seed=seed)
    if options:
        raise RecipeError(f"{type(method).__name__} has its options already; leave {', '.join(options)} out")
    return name_of(method), method, {key: getattr(method, key) for key in schema(type(method))}


def origin_of(
    experts: Experts, name: str, options: Mapping[str, Any], *, seed: int, vector: str | None = None
) -> Origin:
    return Origin(
        {
            "method": {"name": name, "parameters": plain(options)},
            "seed": seed,
            "vector": vector,
            "notes": list(experts.notes),
        },
        experts=experts,
    )


def check_merge(experts: Experts, method: str, *, device: str = "cpu", vector: str | None = None) -> None:
    check_problems((*experts.problems, *merge_problems(experts, method, device=device)))
    check_tied(experts)
    if vector is None:
        with fixed_threads(1):  # small products, for which more threads are slower
            check_origin(experts, task_vectors(experts))


def merge_problems(experts: Experts, method: str, *, device: str = "cpu") -> Iterator[Problem]:
    row = known_method(method)
    if row is None:  # an object of a class that is not in the table
        return
    if row.base and not experts.has_base:
        yield Problem(
            "base",
            f"{method} needs the model that the experts were fine-tuned from",
            "give it as 'base' (--base BASE)",
            RecipeError,
        )
    if row.fitted and experts.partial is not None and not experts.partial.family.encoder_class:
        what = f"inputs cannot be encoded here by {experts.partial.family.title}, which is built elsewhere"
        yield Problem("fit", what, "use a method that needs no inputs", RecipeError)
    if device == "cpu" or row.fitted:
        return
    if not row.matrices:
        names = ", ".join(name for name, other in methods().items() if other.matrices)
        what = f"'device' is for methods that decompose matrices ({names}); {method} is as fast as the disk on a CPU"
        yield Problem("device", what, "leave it out", RecipeError)
        return
    try:
        device_of(device)
    except OrthomergeError as error:
        yield Problem.of("device", error)


def task_vectors(
    experts: Experts, vector: str | None = None, *, order: Mapping[str, Spec] | None = None
) -> TaskVectors:
    """Lazy task vectors of the experts, in writing order; with an expression, only the vector that it evaluates to."""
    parts = experts.parts
    merged = [key for key in order or experts.specs if key in parts.merged]
    base = FileTensors({key: (parts.base, parts.base_split.names[key]) for key in merged})
    vectors = {task: TaskVector(base, ((1.0, _delta(source, merged)),)) for task, source in parts.sources.items()}
    return TaskVectors({"vector": evaluate(vector, vectors)} if vector is not None else vectors)


def _delta(source: Source, merged: list[str]) -> Difference | Adapter:
    names = source.split.names
    if isinstance(source.checkpoint, Adapter):
        return source.checkpoint.under(names)
    tensors = FileTensors({key: (source.checkpoint, name) for key, name in names.items()})
    return Difference(tensors, frozenset(key for key in merged if key not in names))


def copied_tensor(experts: Experts, key: str, spec: Spec) -> torch.Tensor:
    """Read a tensor that is copied from the base; integer buffers must be equal in every expert that has them."""
    parts = experts.parts
    name = parts.base_split.names[key]
    tensor = parts.base.read(name, 0, spec.numel)
    for task, source in parts.sources.items():
        other = source.split.names.get(key)
        if is_float(spec.dtype) or other is None or not isinstance(source.checkpoint, Checkpoint):
            continue
        if not torch.equal(tensor, source.checkpoint.read(other, 0, spec.numel).to(tensor.dtype)):
            raise IncompatibleError(
                f"the integer buffer {key!r} differs between the base and expert {task!r} "
                f"({source.checkpoint.origin(other)}); such tensors cannot be merged: use experts of the same base"
            )
    cast = tensor.to(torch_dtype(spec.dtype))
    if is_float(spec.dtype) and not torch.isfinite(cast.float()).all():
        raise NumericalError(
            f"{name!r} in the base ({parts.base.origin(name)}) holds NaN or infinity, or does not fit into "
            f"{spec.dtype}; find a sound checkpoint, or list it under 'ignore'"
        )
    return cast


@dataclass(frozen=True, eq=False)
class MergedTensors:
    """Merged encoder, computed when it is streamed.

    `dtype`: of the result; None: the base's. `vector`: an expression over task vectors. `device`: for decompositions.
    """

    experts: Experts
    method: TensorMethod | SurveyMethod
    dtype: str | None = None
    vector: str | None = None
    device: str = "cpu"

    @cached_property
    def specs(self) -> Mapping[str, Spec]:
        target = DTYPE_NAMES[self.dtype] if self.dtype else None
        specs = {**self.experts.parts.merged, **self.experts.parts.copied}
        return in_writing_order({key: spec.cast(target) for key, spec in specs.items()})

    @cached_property
    def vectors(self) -> TaskVectors:
        device = None if self.device == "cpu" else device_of(self.device)
        return replace(task_vectors(self.experts, self.vector, order=self.specs), device=device)

    @cached_property
    def prepared(self) -> TensorMethod:
        return prepare(self.method, self.vectors)

    def blocks(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        memory = MEMORY * (1 if self.vectors.device is None else _LARGER)
        advice = "close other programs, or use a method that does not need whole matrices, such as task_arithmetic"
        merging = merge_blocks(self.vectors, self.prepared, self._cast, memory=memory)
        with enough_memory(f"a merge of {len(self.experts.tasks)} experts", advice), closing(merging) as merged:
            for key, spec in self.specs.items():
                if key in self.experts.parts.copied:
                    yield key, copied_tensor(self.experts, key, spec)
                    continue
                left = spec.numel
                while left:
                    name, weights = next(merged)
                    left -= weights.numel()
                    yield name, weights

    def _cast(self, block: Block, weights: torch.Tensor) -> tuple[str, torch.Tensor]:
        key = block.site.key
        dtype = self.specs[key].dtype
        cast = weights.to(torch_dtype(dtype))
        if not torch.isfinite(cast.float().sum()) and not torch.isfinite(cast.float()).all():
            raise NumericalError(
                f"{key!r} does not fit into {dtype} after the merge (largest magnitude "
                f"{float(weights.abs().max()):.3g}); use a smaller scale, or --dtype float32 or bfloat16"
            )
        return key, cast.reshape(-1)
