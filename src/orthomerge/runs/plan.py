"""What a recipe would do, from headers alone: every problem, and how much is read, written and held in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from orthomerge.alignment.aligners import chosen_aligner
from orthomerge.core.errors import CheckpointError, OrthomergeError, RecipeError, nearest
from orthomerge.data.reading import may_be_read
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.files.lora import Adapter
from orthomerge.files.publish import check_room, check_target
from orthomerge.merging.merge import DTYPE_NAMES, merge_problems
from orthomerge.merging.methods import find_method, make_method
from orthomerge.merging.stream import MEMORY
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.problems import Problem, check_problems
from orthomerge.models.sources import Parts
from orthomerge.runs.recipe import Merge, Recipe

_FIT = "give the inputs of every expert as 'fit' (--data TASK=PATH)"


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

    @property
    def opened(self) -> list[Checkpoint | Adapter]:
        """Base and experts."""
        parts = self.parts
        return [] if parts is None else [parts.base, *(source.checkpoint for source in parts.sources.values())]

    @cached_property
    def bytes_to_read(self) -> int:
        """Of all files of base and experts."""
        return sum(file.size for opened in self.opened for file in opened.files)

    @cached_property
    def bytes_to_write(self) -> int:
        """Of the encoder."""
        dtype = DTYPE_NAMES.get(self.recipe.dtype)
        specs = [] if self.parts is None else [*self.parts.merged.values(), *self.parts.copied.values()]
        return sum(spec.cast(dtype).nbytes for spec in specs)

    @cached_property
    def peak_memory(self) -> int:
        """Bytes of blocks that are under way at once, at the most (the interpreter and torch come on top).

        0 where experts or method cannot be opened.
        """
        if self.parts is None or any(problem.where == "method" for problem in self.problems):
            return 0
        tasks = self.experts.tasks if self.recipe.vector is None else ("vector",)
        method = make_method(self.recipe.method, self.recipe.parameters, tasks=tasks, seed=self.recipe.seed)
        if getattr(method, "scope", "element") != "matrix":
            return MEMORY
        largest = max((spec.numel for spec in self.parts.merged.values() if len(spec.shape) == 2), default=0)
        # A matrix method works in float64 beside the block itself.
        count = len(self.parts.sources)
        return max(MEMORY, largest * (4 * (count + 4) + 8 * (count + 3)))

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        document: dict[str, Any] = {
            "ok": not self.problems,
            "problems": [{"where": each.where, "what": each.what, "fix": each.fix} for each in self.problems],
            "notes": list(self.experts.notes),
        }
        if (parts := self.parts) is None:
            return document
        left_out = {task: source.split.left_out for task, source in parts.sources.items()}
        document |= {
            "family": parts.family.name,
            "method": self.recipe.method,
            "tensors": {"merged": len(parts.merged), "copied": len(parts.copied)},
            "left_out": {"base": parts.base_split.left_out, **left_out},
            "heads": {task: list(source.labels) for task, source in parts.sources.items()},
            "bytes": {"read": self.bytes_to_read, "write": self.bytes_to_write, "memory": self.peak_memory},
        }
        for name in ("fit", "align"):
            section = getattr(self.recipe, name)
            if section is not None:
                document[name] = {"split": section.split, "limit": section.limit, "tasks": list(section.data)}
        return document


def plan(recipe: Recipe) -> Plan:
    """Open everything, read headers only, and list every problem; nothing is computed or written."""
    experts = open_experts(recipe.opening)
    plan = Plan(recipe, experts, recipe_problems(recipe, experts))
    if recipe.out is None or plan.parts is None:
        return plan
    out = Path(recipe.out)
    try:
        check_target(out, inputs=[opened.path for opened in plan.opened])
        check_room(out.expanduser().absolute().parent, plan.bytes_to_write)
    except OrthomergeError as error:
        return Plan(recipe, experts, (*plan.problems, Problem.of("out", error)))
    return plan


def check_recipe(recipe: Recipe, experts: Experts | None = None, *, merges: Sequence[Merge] | None = None) -> Experts:
    """The opened experts of a recipe; if anything is wrong with it, an error that lists all problems.

    `merges`: those of a sweep, in the place of the recipe's own.
    """
    experts = experts or open_experts(recipe.opening)
    problems = recipe_problems(recipe, experts, merges=merges)
    check_problems(problems)
    return experts


def recipe_problems(recipe: Recipe, experts: Experts, *, merges: Sequence[Merge] | None = None) -> tuple[Problem, ...]:
    """Problems of merges, of every section of a recipe, and of its experts, in this order."""
    merges = [recipe.merge] if merges is None else merges
    problems = list(dict.fromkeys(problem for merge in merges for problem in _merge(recipe, experts, merge)))
    if (align := recipe.align) is not None:
        problems += _raised("align", lambda: chosen_aligner(align.aligner, align.options, seed=recipe.seed))
        problems += _data(recipe, "align", align.data)
    if (evaluate := recipe.evaluate) is not None:
        from orthomerge.runs.protocols import detail_of, protocols_of

        problems += _raised("evaluate", lambda: protocols_of(evaluate.scorings, evaluate.support))
        problems += _raised("diagnose", lambda: detail_of(recipe))
        problems += _data(recipe, "evaluate", evaluate.data)
    problems += experts.problems
    if experts.partial is not None and not experts.partial.family.encoder_class:
        for name in ("align", "evaluate"):
            if getattr(recipe, name) is not None:
                what = f"inputs cannot be encoded here by {experts.partial.family.title}, which is built elsewhere"
                problems.append(Problem(name, what, "leave the section out", RecipeError))
    return tuple(problems)


def _merge(recipe: Recipe, experts: Experts, merge: Merge) -> Iterator[Problem]:
    """What is wrong with the method, its options and its inputs, which are not read."""
    tasks = experts.tasks if merge.vector is None else ("vector",)
    problem = _raised("method", lambda: make_method(merge.method, merge.parameters, tasks=tasks, seed=merge.seed))
    yield from problem
    if problem:
        return
    yield from merge_problems(experts, merge.method, device=merge.device)
    section, fitted = merge.fit, find_method(merge.method).fitted
    if fitted and section is None:
        yield Problem("fit", f"{merge.method} looks at unlabelled inputs, and none are given", _FIT, RecipeError)
    if section is None:
        return
    if not fitted:
        what = f"{merge.method} looks at no inputs"
        yield Problem("fit", what, "leave the section out, or use a fitted method such as realign", RecipeError)
    if merge.vector is not None:
        yield Problem("fit", "a 'vector' cannot be fitted", "leave one of both out", RecipeError)
    for task in recipe.experts:
        if task not in section.data:
            yield Problem("fit", f"there are no inputs of {task!r}", _FIT, RecipeError)
    yield from _data(recipe, "fit", section.data)


def _data(recipe: Recipe, section: str, data: Mapping[str, Any]) -> Iterator[Problem]:
    for task, source in data.items():
        where = f"{section}: data of {task!r}"
        if task not in recipe.experts:
            yield Problem(where, "there is no such expert", nearest(task, recipe.experts), RecipeError)
        if isinstance(source, str) and not may_be_read(source):  # else it is a task in memory
            fix = "give a file, a folder, or a dataset of Hugging Face"
            yield Problem(where, f"{source} does not exist", fix, CheckpointError)


def _raised(where: str, action: Callable[[], object]) -> list[Problem]:
    """What an action raises, as a problem."""
    try:
        action()
    except OrthomergeError as error:
        return [Problem.of(where, error)]
    return []
