"""The method that a user names, and what a merge records of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import schema
from orthomerge.merging.methods import make_method, name_of, options_of
from orthomerge.models.model import Origin
from orthomerge.models.writing import plain

if TYPE_CHECKING:
    from orthomerge.models.experts import Experts


def chosen_method(
    experts: Experts, method: Any, options: Mapping[str, Any], *, seed: int, vector: str | None = None
) -> tuple[str, Any, dict[str, Any]]:
    """A method's name, the object that carries it out, and all its options."""
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
    """How a merge was made."""
    facts = {
        "method": {"name": name, "parameters": plain(options)},
        "seed": seed,
        "vector": vector,
        "notes": list(experts.notes),
    }
    return Origin(facts, experts=experts)
