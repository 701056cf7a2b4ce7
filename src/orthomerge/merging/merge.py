"""Merge opened experts by a method without inputs, and check first whether they can be merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orthomerge.core.device import device_of
from orthomerge.core.errors import OrthomergeError, RecipeError
from orthomerge.core.schema import schema
from orthomerge.merging.kinship import check_kinship
from orthomerge.merging.merged import MergedTensors, check_tied, task_vectors
from orthomerge.merging.methods import known_method, make_method, methods, name_of, options_of
from orthomerge.models.model_data import Origin
from orthomerge.models.problems import Problem, check_problems
from orthomerge.models.writing import plain

if TYPE_CHECKING:
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


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
    """A merge without inputs, by a method's name and options or by an object that is a method."""
    name, chosen, used = chosen_method(experts, method, options, seed=seed, vector=vector)
    check_merge(experts, name, device=device, vector=vector)
    if hasattr(chosen, "fit"):
        raise RecipeError(f"{name!r} is fitted to inputs: give them as 'data' (--data TASK=PATH for every expert)")
    tensors = MergedTensors(experts, chosen, None if dtype == "keep" else dtype, vector, device)
    return experts.model(tensors, experts.heads, origin_of(experts, name, used, seed=seed, vector=vector))


def chosen_method(
    experts: Experts, method: Any, options: Mapping[str, Any], *, seed: int, vector: str | None = None
) -> tuple[str, Any, dict[str, Any]]:
    """The name of a method, its object, and all its options."""
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
    """What a model records of its merge."""
    facts = {
        "method": {"name": name, "parameters": plain(options)},
        "seed": seed,
        "vector": vector,
        "notes": list(experts.notes),
    }
    return Origin(facts, experts=experts)


def check_merge(experts: Experts, method: str, *, device: str = "cpu", vector: str | None = None) -> None:
    """Refuse experts that cannot be merged by a method, and experts whose task vectors mean nothing."""
    problems = (*experts.problems, *merge_problems(experts, method, device=device))
    if problems:
        check_problems(problems)
    check_tied(experts)
    if vector is None:
        check_kinship(experts, task_vectors(experts))


def merge_problems(experts: Experts, method: str, *, device: str = "cpu") -> Iterator[Problem]:
    """What keeps a method from merging experts that fit together."""
    row = known_method(method)
    if row is None:  # an object of a class that is not in the table
        return
    if row.base and not experts.has_base:
        what = f"{method} needs the model that the experts were fine-tuned from"
        yield Problem("base", what, "give it as 'base' (--base BASE)", RecipeError)
    if row.fitted and experts.partial is not None and not experts.partial.family.encoder_class:
        what = f"inputs cannot be encoded here by {experts.partial.family.title}, which is built elsewhere"
        yield Problem("fit", what, "use a method that needs no inputs", RecipeError)
    if device == "cpu" or row.fitted:
        return
    if not row.matrices:
        names = ", ".join(name for name, each in methods().items() if each.matrices)
        what = f"'device' is for methods that decompose matrices ({names}); {method} is as fast as the disk on a CPU"
        yield Problem("device", what, "leave it out", RecipeError)
        return
    try:
        device_of(device)
    except OrthomergeError as error:
        yield Problem.of("device", error)
