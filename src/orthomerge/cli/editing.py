"""Flags of `negate` and `analogy`: experts, the grid of a search, and the output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.cli import options
from orthomerge.cli.flags import Parts
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.core.progress import Progress
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model
    from orthomerge.runs.recipe import Recipe


@dataclass(frozen=True)
class Edit(options.Compute):
    """Experts of a search, and the model that it writes if `--out` is given."""

    experts: options.Experts = ()
    base: options.Base = None
    grid: options.Grid = None
    out: options.OutIfAny = None
    dtype: options.Dtype = None
    force: options.Force = False

    def open(self, progress: Progress) -> tuple[Recipe, Experts, dict[str, Any]]:
        """Return the recipe of the command line, whose output is checked, its experts, and options of the search."""
        from orthomerge.api.request import read_request
        from orthomerge.files.publish import check_target
        from orthomerge.models.experts import Experts

        request = read_request(self.experts, edit=True, base=self.base, out=self.out, dtype=self.dtype)
        if request.out is not None:
            check_target(Path(request.out), force=self.force)
        how = {"dtype": request.dtype, "seed": request.seed, "encoding": self.encoding(cached=False)}
        grid = {} if self.grid is None else {"grid": self.grid}
        return request, Experts(request.opening).check(), {**how, **grid, "progress": progress}

    def write(
        self, model: Model | None, request: Recipe, *, data: Iterable[str], reason: str, progress: Progress
    ) -> Parts:
        """Write the model that a search chose. `reason`: the error if it chose none."""
        from orthomerge.models.writing import write_model
        from orthomerge.runs.models import existing

        if request.out is None:
            return
        if model is None:
            raise RecipeError(reason)
        out, size, inputs = Path(request.out), request.max_shard_size, existing(data)
        manifest = write_model(model, out, force=self.force, max_shard_size=size, inputs=inputs, progress=progress)
        yield f"wrote {request.out}, verified; heads: {', '.join(manifest['heads'])}"
