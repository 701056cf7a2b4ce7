"""What a recipe would do, from headers alone: every problem, and how much is read, written and held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orthomerge.core.errors import OrthomergeError
from orthomerge.files.publish import check_room, check_target
from orthomerge.merging.merged import DTYPE_NAMES
from orthomerge.merging.methods import make_method
from orthomerge.merging.stream import MEMORY
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.problems import Problem
from orthomerge.models.sources import Parts
from orthomerge.runs.checks import recipe_problems
from orthomerge.runs.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """A recipe, its opened experts, and everything that is wrong."""

    recipe: Recipe
    experts: Experts
    problems: tuple[Problem, ...]

    @property
    def parts(self) -> Parts | None:
        """What could be opened."""
        return self.experts.partial

    @cached_property
    def bytes_to_read(self) -> int:
        """Of all files of base and experts."""
        parts = self.experts.partial
        opened = [] if parts is None else [parts.base, *(source.checkpoint for source in parts.sources.values())]
        return sum(file.size for source in opened for file in source.files)

    @cached_property
    def bytes_to_write(self) -> int:
        """Of the encoder."""
        parts, target = self.experts.partial, DTYPE_NAMES.get(self.recipe.dtype)
        specs = [] if parts is None else [*parts.merged.values(), *parts.copied.values()]
        return sum(spec.cast(target).nbytes for spec in specs)

    @cached_property
    def peak_memory(self) -> int:
        """Bytes of blocks that are under way at once, at the most (the interpreter and torch come on top).

        0 where experts or method cannot be opened.
        """
        parts = self.experts.partial
        if parts is None or any(problem.where == "method" for problem in self.problems):
            return 0
        tasks = self.experts.tasks if self.recipe.vector is None else ("vector",)
        method = make_method(self.recipe.method, self.recipe.parameters, tasks=tasks, seed=self.recipe.seed)
        matrix = getattr(method, "scope", "element") == "matrix"
        largest = max((spec.numel for spec in parts.merged.values() if matrix and len(spec.shape) == 2), default=0)
        # A matrix method works in float64 beside the block itself.
        count = len(parts.sources)
        return max(MEMORY, largest * (4 * (count + 4) + 8 * (count + 3)))


def plan(recipe: Recipe) -> Plan:
    """Open everything, read headers only, and list every problem; nothing is computed or written."""
    experts = open_experts(recipe.opening)
    plan = Plan(recipe, experts, recipe_problems(recipe, experts))
    parts = experts.partial
    if recipe.out is None or parts is None:
        return plan
    out = Path(recipe.out)
    try:
        check_target(out, inputs=[parts.base.path, *(source.checkpoint.path for source in parts.sources.values())])
        check_room(out.expanduser().absolute().parent, plan.bytes_to_write)
    except OrthomergeError as error:
        return Plan(recipe, experts, (*plan.problems, Problem.of("out", error)))
    return plan
