"""A recipe up to the model: merge or fit, align the heads, write the folder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.files.publish import check_target
from orthomerge.files.run_state import clear_state, state_folder
from orthomerge.merging.merge import merge_opened
from orthomerge.models.writing import write_model
from orthomerge.runs.plan import check_recipe
from orthomerge.runs.recipe import Merge, Recipe
from orthomerge.runs.sections import Align

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


def merge(
    experts: Experts,
    merge: Merge,
    *,
    state: Path | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Merge or fit; nothing is written but `state`, from which a long fit that was killed continues."""
    method, options = merge.method, dict[str, Any](dtype=merge.dtype, seed=merge.seed)
    if merge.fit is None:
        return merge_opened(experts, method, merge.parameters, device=merge.device, vector=merge.vector, **options)
    from orthomerge.fitting.fit import fit

    options |= {name: value for name, value in vars(merge.fit).items() if name not in ("data", "resume")}
    options |= {"state": state if merge.fit.resume else None, "encoding": encoding, "progress": progress}
    return fit(experts, method, merge.fit.data, merge.parameters, **options)


def align(model: Model, experts: Experts, recipe: Recipe, section: Align, **how: Any) -> Model:
    """The model with its heads aligned as a section `align` says. `how`: encoding and progress."""
    from orthomerge.alignment.align import align_model  # most merges need no aligner, and importing them takes time

    return align_model(model, experts=experts, seed=recipe.seed, **vars(section), **how)


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

    `experts`: if they are open already.
    """
    place = out or recipe.out
    if place is None:
        raise RecipeError("where to? Give 'out' in the recipe, or --out")
    target = Path(place).expanduser()
    experts = check_recipe(recipe, experts)
    inputs = [*input_paths(recipe), *(each.path for each in experts.checkpoints().values())]
    check_target(target, force=force, inputs=inputs)  # before any work
    state = state_folder(target, "fitting")
    model = merge(experts, recipe.merge, state=state, encoding=encoding, progress=progress)
    if recipe.align is not None:
        model = align(model, experts, recipe, recipe.align, encoding=encoding, progress=progress)
    manifest = write_weights(model, target, recipe, force=force, inputs=inputs, progress=progress)
    clear_state(state)
    return Written(target, manifest, model)


def write_weights(
    model: Model,
    target: Path,
    recipe: Recipe,
    *,
    force: bool = False,
    inputs: Iterable[Path] = (),
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write a model of a recipe; its manifest."""
    size = recipe.max_shard_size
    return write_model(model, target, force=force, max_shard_size=size, inputs=inputs, progress=progress)


def input_paths(recipe: Recipe) -> list[Path]:
    """The experts, base and data of a recipe that are on this machine; an output must not overlap them."""
    models = [*(expert.path for expert in recipe.tasks.values()), recipe.base]
    return existing([*models, *(source for source in recipe.data if isinstance(source, str | Path))])


def existing(places: Iterable[str | Path | None]) -> list[Path]:
    """The places that are on this machine; the others are names on a hub, or refused by whoever opens them."""
    paths = []
    for place in places:
        with suppress(OSError, RuntimeError, ValueError):
            if place is not None and Path(place).expanduser().exists():
                paths.append(Path(place).expanduser())
    return paths
