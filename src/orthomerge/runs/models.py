"""The models of a run: the merge, and the same with its heads aligned.

RUN/models/METHOD            the merge
RUN/models/METHOD-ALIGNER    with its heads aligned

The last one, the merge or its aligned form, is at the recipe's `out` if it has one. Base and experts are opened where
they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orthomerge.api.load import load
from orthomerge.api.recipes import aligned, input_paths, write
from orthomerge.core.progress import Progress
from orthomerge.core.version import VERSION
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.models.writing import write_model
from orthomerge.runs.digests import Digests, digest_of, output_files
from orthomerge.runs.recipe import Recipe

MODELS = "models/"
# Sections and places of a recipe, which are no options of its merge; the inputs of `fit` count by content.
_NO_OPTIONS = ("experts", "base", "out", "align", "fit", "evaluate", "diagnose", "report", "sweep")
_NOT_OF_A_FIT = ("data", "resume", "save_every")


@dataclass(frozen=True)
class Places:
    """Where the models of a run are. `aligned`: None if heads are not aligned."""

    merged: Path
    aligned: Path | None

    @property
    def out(self) -> Path:
        """The last model."""
        return self.aligned or self.merged


def places_of(recipe: Recipe, run: Path) -> Places:
    """Where a recipe's models go."""
    folder, method = run / MODELS, recipe.method.replace("/", "_")
    last = Path(recipe.out).expanduser() if recipe.out is not None else None
    if recipe.align is None:
        return Places(last or folder / method, None)
    return Places(folder / method, last or folder / f"{method}-{recipe.align.aligner}".replace("/", "_"))


def merge_key(recipe: Recipe, experts: Experts, digests: Digests) -> str:
    """What the merge depends on: the recipe without names of places, and the contents of its inputs."""
    checkpoints = experts.checkpoints()
    about: dict[str, Any] = {
        "version": VERSION,
        "recipe": {name: value for name, value in vars(recipe).items() if name not in _NO_OPTIONS},
        "base": None if recipe.base is None else digests.checkpoint(checkpoints["base"]),
        "experts": [
            (task, {**asdict(expert), "path": digests.checkpoint(checkpoints[f"expert {task}"])})
            for task, expert in recipe.tasks.items()
        ],
    }
    if recipe.fit is not None:
        options = {name: value for name, value in vars(recipe.fit).items() if name not in _NOT_OF_A_FIT}
        about["fit"] = [options, {task: digests.source(source) for task, source in recipe.fit.data.items()}]
    return digest_of(about)


def merge_model(
    recipe: Recipe, experts: Experts, places: Places, *, force: bool, progress: Progress
) -> dict[Path, str]:
    """Merge or fit; the output's files with their hashes."""
    write(recipe.merging, out=places.merged, experts=experts, force=force, progress=progress)
    return output_files(places.merged)


def align_key(recipe: Recipe, experts: Experts, places: Places, digests: Digests) -> str:
    """What the aligned heads depend on: the merge, the experts, the section and its inputs."""
    section = recipe.align
    assert section is not None  # noqa: S101 - for mypy: there is no such stage without
    options = {name: value for name, value in vars(section).items() if name != "data"}
    data = {task: digests.source(source) for task, source in section.data.items()}
    return digest_of([merge_key(recipe, experts, digests), output_digest(places.merged), options, data])


def align_model(
    recipe: Recipe, experts: Experts, places: Places, *, force: bool, progress: Progress
) -> dict[Path, str]:
    """Align the heads; the output's files with their hashes."""
    assert places.aligned is not None  # noqa: S101 - as above
    model = aligned(recipe, read_back(places.merged, experts), experts, progress=progress)
    inputs = [*input_paths(recipe), places.merged]
    write_model(model, places.aligned, force=force, max_shard_size=recipe.max_shard_size, inputs=inputs)
    return output_files(places.aligned)


def read_back(folder: Path, experts: Experts) -> Model:
    """A model that a stage has written."""
    model = load(folder)
    return replace(model, origin=replace(model.origin, experts=experts))


def output_digest(folder: Path) -> str:
    """What identifies an output, whatever its card says."""
    files = output_files(folder)
    return digest_of({path.relative_to(folder).as_posix(): digest for path, digest in files.items()})
