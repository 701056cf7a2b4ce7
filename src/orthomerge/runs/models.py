"""Carry out a recipe up to the model folder: check headers, merge or fit, align the heads, write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from orthomerge.alignment.aligners import chosen_aligner
from orthomerge.core.errors import CheckpointError, RecipeError, nearest
from orthomerge.core.progress import SILENT, Progress
from orthomerge.data.reading import may_be_read
from orthomerge.files.publish import check_room, check_target
from orthomerge.files.run_state import clear_state, state_folder
from orthomerge.merging.merge import DTYPE_NAMES, merge_opened, merge_problems
from orthomerge.merging.methods import find_method, make_method
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.models.problems import Problem, check_problems, collected
from orthomerge.models.writing import write_model
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Align, protocols_of

_FIT = "give the inputs of every expert as 'fit' (--data TASK=PATH)"


def plan(recipe: Recipe) -> tuple[list[Problem], dict[str, Any]]:
    """List the problems of a recipe from headers, and describe them and what the merge would read and write."""
    if recipe.searches_scale:
        recipe = recipe.with_scale(1.0)  # the plan is the same for any number
    experts = Experts(recipe.opening)
    problems, parts = recipe_problems(recipe, experts), experts.partial
    document: dict[str, Any] = {"notes": list(experts.notes)}
    if parts is not None:
        opened = [parts.base, *(source.checkpoint for source in parts.sources.values())]
        dtype = DTYPE_NAMES.get(recipe.dtype)
        size = sum(spec.cast(dtype).nbytes for spec in (*parts.merged.values(), *parts.copied.values()))
        left_out = {task: source.split.left_out for task, source in parts.sources.items()}
        document |= {
            "family": parts.family.name,
            "method": recipe.method,
            "tensors": {"merged": len(parts.merged), "copied": len(parts.copied)},
            "left_out": {"base": parts.base_split.left_out, **left_out},
            "heads": {task: list(source.labels) for task, source in parts.sources.items()},
            "bytes": {"read": sum(file.size for checkpoint in opened for file in checkpoint.files), "write": size},
        }
        for name in ("fit", "align"):
            section = getattr(recipe, name)
            if section is not None:
                document[name] = {"split": section.split, "limit": section.limit, "tasks": list(section.data)}
        if recipe.out is not None:
            with collected(problems, "out"):
                check_target(Path(recipe.out), inputs=[checkpoint.path for checkpoint in opened])
                check_room(Path(recipe.out).expanduser().absolute().parent, size)
    listed = [{name: getattr(problem, name) for name in ("where", "what", "fix")} for problem in problems]
    return problems, {"ok": not problems, "problems": listed, **document}


def check_recipe(recipe: Recipe, *, merges: Sequence[Recipe] = ()) -> Experts:
    """Return the opened experts of a recipe, or raise an error with every problem. `merges`: those of a sweep."""
    experts = Experts(recipe.opening)
    check_problems(recipe_problems(recipe, experts, merges=merges))
    return experts


def recipe_problems(recipe: Recipe, experts: Experts, *, merges: Sequence[Recipe] = ()) -> list[Problem]:
    """List problems of the merges, of every section of a recipe, and of its experts, in this order."""
    of_merges = (problem for merge in merges or [recipe] for problem in _merge_problems(merge, experts))
    problems = list(dict.fromkeys(of_merges))
    if recipe.align is not None:
        with collected(problems, "align"):
            chosen_aligner(recipe.align.aligner, recipe.align.options, seed=recipe.seed)
        problems += _data_problems(recipe, "align", recipe.align.data)
    if recipe.evaluate is not None:
        with collected(problems, "evaluate"):
            protocols_of(recipe.evaluate.scorings, recipe.evaluate.support)
        with collected(problems, "diagnose"):
            recipe.diagnosis.detail(seed=0)
        problems += _data_problems(recipe, "evaluate", recipe.evaluate.data)
    problems += experts.problems
    if experts.partial is not None and not experts.partial.family.encoder_class:
        for name in ("align", "evaluate"):
            if getattr(recipe, name) is not None:
                what = f"orthomerge can merge {experts.partial.family.title}, but not run it on inputs"
                problems.append(Problem(name, what, "leave the section out", RecipeError))
    return problems


def _merge_problems(recipe: Recipe, experts: Experts) -> list[Problem]:
    """List problems of a method, its options and its inputs."""
    method, fit, problems = recipe.method, recipe.fit, list[Problem]()
    tasks = tuple(recipe.experts) if recipe.vector is None else ("vector",)
    with collected(problems, "method"):
        make_method(method, recipe.parameters, tasks=tasks, seed=recipe.seed)
    if problems:
        return problems
    problems += merge_problems(experts, method, device=recipe.device)
    fitted = find_method(method).fitted
    if fitted and fit is None:
        problems.append(Problem("fit", f"{method} needs unlabelled inputs, but the recipe has none", _FIT, RecipeError))
    if fit is None:
        return problems
    if not fitted:
        fix = "leave the section out, or use a fitted method such as realign"
        problems.append(Problem("fit", f"{method} uses no inputs", fix, RecipeError))
    if recipe.vector is not None:
        problems.append(Problem("fit", "a 'vector' cannot be fitted", "leave out 'vector' or 'fit'", RecipeError))
    for task in recipe.experts:
        if task not in fit.data:
            problems.append(Problem("fit", f"there are no inputs of {task!r}", _FIT, RecipeError))
    return [*problems, *_data_problems(recipe, "fit", fit.data)]


def _data_problems(recipe: Recipe, section: str, data: Mapping[str, Any]) -> Iterator[Problem]:
    for task, source in data.items():
        where = f"{section}: data of {task!r}"
        if task not in recipe.experts:
            yield Problem(where, "there is no such expert", nearest(task, recipe.experts), RecipeError)
        if isinstance(source, str) and not may_be_read(source):  # others are tasks in memory
            fix = "give a file, a folder, or a dataset of the Hugging Face Hub"
            yield Problem(where, f"{source} does not exist", fix, CheckpointError)


def write(recipe: Recipe, *, out: str | Path | None = None, force: bool = False, progress: Progress = SILENT) -> Path:
    """Write the model folder of a recipe, whole or not at all, and return its path."""
    path = out or recipe.out
    if path is None:
        raise RecipeError("the recipe has no output folder; give 'out' in the recipe, or --out")
    target = Path(path).expanduser()
    experts = check_recipe(recipe)
    inputs = [*input_paths(recipe), *(checkpoint.path for checkpoint in experts.checkpoints().values())]
    check_target(target, force=force, inputs=inputs)  # before any work
    state = state_folder(target, "fitting")
    model = merge(experts, recipe, state=state, progress=progress)
    if recipe.align is not None:
        model = align(model, experts, recipe.align, seed=recipe.seed, progress=progress)
    write_weights(model, target, recipe, force=force, progress=progress)
    clear_state(state)
    return target


def merge(experts: Experts, recipe: Recipe, *, state: Path | None = None, progress: Progress = SILENT) -> Model:
    """Merge or fit; nothing is written but `state`, from which an interrupted fit continues."""
    method, parameters, section = recipe.method, recipe.parameters, recipe.fit
    options: dict[str, Any] = {"dtype": recipe.dtype, "seed": recipe.seed}
    if section is None:
        return merge_opened(experts, method, parameters, device=recipe.device, vector=recipe.vector, **options)
    from orthomerge.fitting.fit import fit

    options |= {name: value for name, value in vars(section).items() if name not in ("data", "resume")}
    state = state if section.resume else None
    return fit(experts, method, section.data, parameters, state=state, progress=progress, **options)


def align(model: Model, experts: Experts, section: Align, *, seed: int, progress: Progress) -> Model:
    from orthomerge.alignment import align as alignment  # slow to import, and most merges do not need it

    return alignment.align(model, experts=experts, seed=seed, progress=progress, **vars(section))


def write_weights(model: Model, target: Path, recipe: Recipe, *, force: bool = False, progress: Progress) -> None:
    size, inputs = recipe.max_shard_size, input_paths(recipe)
    write_model(model, target, force=force, max_shard_size=size, inputs=inputs, progress=progress)


def input_paths(recipe: Recipe) -> list[Path]:
    """Return the local paths of experts, base and data of a recipe, which an output must not overlap."""
    models = [*(expert.path for expert in recipe.tasks.values()), recipe.base]
    return existing([*models, *(source for source in recipe.data if isinstance(source, str | Path))])


def existing(paths: Iterable[str | Path | None]) -> list[Path]:
    """Return the paths that exist; others are names on the Hub, or are refused when they are opened."""
    present = []
    for path in paths:
        with suppress(OSError, RuntimeError, ValueError):
            if path is not None and Path(path).expanduser().exists():
                present.append(Path(path).expanduser())
    return present
