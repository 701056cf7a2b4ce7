"""Open experts and write a model, for the commands `negate` and `analogy`."""

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
    """Read the recipe of a command line, check its output, and open its experts."""
    from orthomerge.api.request import read_request
    from orthomerge.files.publish import check_target
    from orthomerge.models.experts import Experts

    request = read_request(words, edit=True, **options)
    if request.out is not None:
        check_target(Path(request.out), force=force)
    return request, Experts(request.opening).check()


def write_edited(
    model: Model | None,
    request: Recipe,
    *,
    data: Iterable[str],
    force: bool,
    as_json: bool,
    progress: Progress,
    reason: str,
) -> None:
    """Write the model that a search chose, if `--out` is given. `reason`: the error if it chose none."""
    from orthomerge.models.writing import write_model
    from orthomerge.runs.models import existing

    if request.out is None:
        return
    if model is None:
        raise RecipeError(reason)
    size, inputs = request.max_shard_size, existing(data)
    manifest = write_model(model, Path(request.out), force=force, max_shard_size=size, inputs=inputs, progress=progress)
    if not as_json:
        click.echo(f"wrote {request.out}, verified; heads: {', '.join(manifest['heads'])}")
