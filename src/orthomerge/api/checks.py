"""Everything that is wrong with a recipe, told from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orthomerge.alignment.aligners import chosen_aligner
from orthomerge.core.errors import CheckpointError, OrthomergeError, RecipeError, nearest
from orthomerge.data.reading import may_be_read
from orthomerge.merging.merge import merge_problems
from orthomerge.merging.methods import find_method, make_method
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.problems import Problem
from orthomerge.runs.recipe import Recipe

_FIT = "give the inputs of every expert as 'fit' (--data TASK=PATH)"


def check_recipe(recipe: Recipe, experts: Experts | None = None) -> Experts:
    """The opened experts of a recipe; if anything is wrong with it, an error that lists all problems."""
    experts = experts or open_experts(recipe.opening)
    problems = recipe_problems(recipe, experts)
    return experts.with_problems(problems).check() if problems else experts


def recipe_problems(recipe: Recipe, experts: Experts) -> tuple[Problem, ...]:
    """Problems of experts, method and every section of a recipe, in this order."""
    tasks = experts.tasks if recipe.vector is None else ("vector",)
    found = list(
        _raised("method", lambda: make_method(recipe.method, recipe.parameters, tasks=tasks, seed=recipe.seed))
    )
    if not found:
        found += merge_problems(experts, recipe.method, device=recipe.device)
        found += _fit(recipe)
    found += _align(recipe)
    found += _evaluate(recipe)
    found += experts.problems
    if experts.found is not None and not experts.found.family.encoder_class:
        for name in ("align", "evaluate"):
            if getattr(recipe, name) is not None:
                what = f"inputs cannot be encoded here by {experts.found.family.title}, which is built elsewhere"
                found.append(Problem(name, what, "leave the section out", RecipeError))
    return tuple(found)


def _fit(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with a recipe's section `fit`, or with there being none; inputs are not read."""
    section, fitted = recipe.fit, find_method(recipe.method).fitted
    if fitted and section is None:
        yield Problem("fit", f"{recipe.method} looks at unlabelled inputs, and none are given", _FIT, RecipeError)
    if section is None:
        return
    if not fitted:
        what = f"{recipe.method} looks at no inputs"
        yield Problem("fit", what, "leave the section out, or use a fitted method such as realign", RecipeError)
    if recipe.vector is not None:
        yield Problem("fit", "a 'vector' cannot be fitted", "leave one of both out", RecipeError)
    for task in recipe.experts:
        if task not in section.data:
            yield Problem("fit", f"there are no inputs of {task!r}", _FIT, RecipeError)
    yield from _data(recipe, "fit", section.data)


def _align(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with a recipe's section `align`; inputs are not read."""
    section = recipe.align
    if section is None:
        return
    yield from _raised("align", lambda: chosen_aligner(section.aligner, section.options, seed=recipe.seed))
    yield from _data(recipe, "align", section.data)


def _evaluate(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with a recipe's sections `evaluate` and `diagnose`; inputs are not read."""
    if recipe.evaluate is None:
        return
    from orthomerge.runs.looks_of import looks_of
    from orthomerge.runs.protocols_of import protocols_of

    yield from _raised("evaluate", lambda: protocols_of(recipe))
    yield from _raised("diagnose", lambda: looks_of(recipe))
    yield from _data(recipe, "evaluate", recipe.evaluate.data)


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
