"""A recipe up to the model: merge or fit, then align."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.api.checks import check_recipe
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.files.publish import check_target
from orthomerge.files.run_state import clear_state, state_folder
from orthomerge.merging.merge import merge_opened
from orthomerge.models.writing import write_model
from orthomerge.runs.recipe import Recipe

if TYPE_CHECKING:
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model


@dataclass(frozen=True)
class Written:
    """A model folder and the model in it."""

    out: Path
    manifest: dict[str, Any]
    model: Model


def carry_out(
    recipe: Recipe,
    *,
    experts: Experts | None = None,
    state: Path | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """The model that a recipe describes; only the state of a long fit is written. `experts`: if opened already."""
    experts = check_recipe(recipe, experts)
    if recipe.fit is None:
        model = merge_opened(
            experts,
            recipe.method,
            recipe.parameters,
            dtype=recipe.dtype,
            seed=recipe.seed,
            device=recipe.device,
            vector=recipe.vector,
        )
    else:
        model = _fitted(recipe, experts, state, encoding, progress)
    return model if recipe.align is None else aligned(recipe, model, experts, encoding=encoding, progress=progress)


def aligned(
    recipe: Recipe,
    model: Model,
    experts: Experts,
    *,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """The merge of a recipe with its heads aligned, as the section `align` says."""
    section = recipe.align
    if section is None:
        raise RecipeError("the recipe has no section 'align'; add one with the inputs of the tasks")
    from orthomerge.api.align import align  # most merges need no aligner, and importing them takes time

    return align(
        model,
        section.data,
        aligner=section.aligner,
        options=section.options,
        experts=experts,
        split=section.split,
        limit=section.limit,
        seed=recipe.seed,
        encoding=encoding,
        progress=progress,
    )


def _fitted(
    recipe: Recipe, experts: Experts, state: Path | None, encoding: Encoding | None, progress: Progress
) -> Model:
    section = recipe.fit
    if section is None:
        raise RecipeError(f"{recipe.method!r} is fitted to inputs: give --data TASK=PATH for every expert, or 'fit'")
    from orthomerge.api.fit import fit

    return fit(
        experts,
        recipe.method,
        section.data,
        recipe.parameters,
        dtype=recipe.dtype,
        seed=recipe.seed,
        device=section.device,
        split=section.split,
        limit=section.limit,
        precision=section.precision,
        state=state if section.resume else None,
        save_every=section.save_every,
        encoding=encoding,
        progress=progress,
    )


def write(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    experts: Experts | None = None,
    force: bool = False,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Written:
    """Carry out a recipe up to a model folder: either the whole folder is there afterwards, or nothing of it.

    `experts`: if opened already.
    """
    place = out or recipe.out
    if place is None:
        raise RecipeError("where to? Give 'out' in the recipe, or --out")
    target = Path(place)
    experts = check_recipe(recipe, experts)
    inputs = [*input_paths(recipe), *(each.path for each in experts.checkpoints().values())]
    check_target(target, force=force, inputs=inputs)  # before any work
    target = target.expanduser()
    state = state_folder(target, "fitting")
    model = carry_out(recipe, experts=experts, state=state, encoding=encoding, progress=progress)
    progress.stage("merging", sum(spec.nbytes for spec in model.weights.specs.values()))
    manifest = write_model(
        model,
        target,
        force=force,
        max_shard_size=recipe.max_shard_size,
        inputs=inputs,
        progress=progress.advance,
    )
    clear_state(state)
    return Written(target, manifest, model)


def input_paths(recipe: Recipe) -> Iterator[Path]:
    """What lies on this machine of experts, base and data, and must not be overlapped by an output."""
    data = [source for section in (recipe.fit, recipe.align) if section for source in section.data.values()]
    given = [expert.path for expert in recipe.tasks.values()] + ([recipe.base] if recipe.base is not None else [])
    for text in (*given, *(str(source) for source in data if isinstance(source, str | Path))):
        with suppress(OSError, RuntimeError, ValueError):  # whoever opens it says what is wrong with it
            if (path := Path(text).expanduser()).exists():
                yield path
