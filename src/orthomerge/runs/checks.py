"""Everything that is wrong with a recipe, from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from orthomerge.alignment.aligners import chosen_aligner
from orthomerge.core.errors import CheckpointError, OrthomergeError, RecipeError, nearest
from orthomerge.data.reading import may_be_read
from orthomerge.merging.merge import merge_problems
from orthomerge.merging.methods import find_method, make_method
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.problems import Problem
from orthomerge.runs.recipe import Merge, Recipe

_FIT = "give the inputs of every expert as 'fit' (--data TASK=PATH)"


def check_recipe(recipe: Recipe, experts: Experts | None = None, *, merges: Sequence[Merge] | None = None) -> Experts:
    """The opened experts of a recipe; if anything is wrong with it, an error that lists all problems.

    `merges`: those of a sweep, in the place of the recipe's own.
    """
    experts = experts or open_experts(recipe.opening)
    problems = recipe_problems(recipe, experts, merges=merges)
    return experts.with_problems(problems).check() if problems else experts


def recipe_problems(recipe: Recipe, experts: Experts, *, merges: Sequence[Merge] | None = None) -> tuple[Problem, ...]:
    """Problems of merges, of every section of a recipe, and of its experts, in this order."""
    merges = [recipe.merge] if merges is None else merges
    problems = list(dict.fromkeys(problem for merge in merges for problem in _merge(recipe, experts, merge)))
    problems += [*_align(recipe), *_evaluate(recipe), *experts.problems]
    if experts.found is not None and not experts.found.family.encoder_class:
        for name in ("align", "evaluate"):
            if getattr(recipe, name) is not None:
                what = f"inputs cannot be encoded here by {experts.found.family.title}, which is built elsewhere"
                problems.append(Problem(name, what, "leave the section out", RecipeError))
    return tuple(problems)


def _merge(recipe: Recipe, experts: Experts, merge: Merge) -> Iterator[Problem]:
    """What is wrong with the method, its options and its inputs, which are not read."""
    tasks = experts.tasks if merge.vector is None else ("vector",)
    problems = list(
        _raised("method", lambda: make_method(merge.method, merge.parameters, tasks=tasks, seed=merge.seed))
    )
    yield from problems
    if not problems:
        yield from merge_problems(experts, merge.method, device=recipe.device)
        yield from _fit(recipe, merge)


def _fit(recipe: Recipe, merge: Merge) -> Iterator[Problem]:
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


def _align(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with the section `align`; inputs are not read."""
    section = recipe.align
    if section is None:
        return
    yield from _raised("align", lambda: chosen_aligner(section.aligner, section.options, seed=recipe.seed))
    yield from _data(recipe, "align", section.data)


def _evaluate(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with the sections `evaluate` and `diagnose`; inputs are not read."""
    section = recipe.evaluate
    if section is None:
        return
    from orthomerge.runs.scoring import detail_of, protocols_of

    yield from _raised("evaluate", lambda: protocols_of(section, recipe.method))
    yield from _raised("diagnose", lambda: detail_of(recipe))
    yield from _data(recipe, "evaluate", section.data)


def _data(recipe: Recipe, section: str, data: Mapping[str, Any]) -> Iterator[Problem]:
    for task, source in data.items():
        where = f"{section}: data of {task!r}"
        if task not in recipe.experts:
            yield Problem(where, "there is no such expert", nearest(task, recipe.experts), RecipeError)
        if isinstance(source, str) and not may_be_read(source):  # else it is a task in memory
            fix = "give a file, a folder, or a dataset of Hugging Face"
            yield Problem(where, f"{source} does not exist", fix, CheckpointError)


def _raised(where: str, action: Callable[[], object]) -> Iterator[Problem]:
    """What an action raises, as a problem."""
    try:
        action()
    except OrthomergeError as error:
        yield Problem.of(where, error)
