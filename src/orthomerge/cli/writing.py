"""Writing the model that a command made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.core.progress import Progress
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model
    from orthomerge.runs.recipe import Recipe


def open_request(words: tuple[str, ...], *, force: bool, **options: Any) -> tuple[Recipe, Experts]:
    """What a command that merges nothing is given, and its experts; the output is checked before any work."""
    from orthomerge.api.request import read_request
    from orthomerge.files.publish import check_target
    from orthomerge.models.experts import open_experts

    request = read_request(words, edit=True, **options)
    if request.out is not None:
        check_target(Path(request.out), force=force)
    return request, open_experts(request.opening).check()


def write(
    model: Model, out: str, *, force: bool, progress: Progress, inputs: Iterable[Path], **options: Any
) -> dict[str, Any]:
    """Write a model folder, and return its manifest."""
    from orthomerge.models.writing import write_model

    progress.stage("merging", sum(spec.nbytes for spec in model.weights.specs.values()))
    place = Path(out).expanduser()
    return write_model(model, place, force=force, inputs=inputs, progress=progress.advance, **options)


def write_edited(
    model: Model | None,
    request: Recipe,
    *,
    data: Iterable[str],
    force: bool,
    as_json: bool,
    progress: Progress,
    otherwise: str,
) -> None:
    """Write what a search along task vectors chose, if there is a place for it; `otherwise`: why it chose nothing."""
    from orthomerge.runs.models import existing_paths

    if request.out is None:
        return
    if model is None:
        raise RecipeError(otherwise)
    size, inputs = request.max_shard_size, existing_paths(data)
    manifest = write(model, request.out, force=force, progress=progress, inputs=inputs, max_shard_size=size)
    if not as_json:
        click.echo(f"wrote {request.out}, verified; heads: {', '.join(manifest['heads'])}")
