"""The base plus a sum of task vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.merging.merge import merge_opened

if TYPE_CHECKING:
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


def arithmetic(experts: Experts, coefficients: Mapping[str, float], *, dtype: str = "float32", seed: int = 0) -> Model:
    """The base plus sum_t coefficient_t tau_t; experts that are not named only give their heads, as they are."""
    for task in coefficients:
        if task not in experts.tasks:
            raise RecipeError(
                f"the task vector of {task!r} is wanted, but its expert was not given; {nearest(task, experts.tasks)}"
            )
    scale = {task: coefficients.get(task, 0.0) for task in experts.tasks}
    return merge_opened(experts, "task_arithmetic", {"scale": scale}, dtype=dtype, seed=seed)
