"""`merge --set scale=auto`: choose the scale, show the curve."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from orthomerge.core.errors import RecipeError
from orthomerge.runs.recipe import Recipe


def choose_scale(recipe: Recipe, data: Mapping[str, str], *, quiet: bool) -> Recipe:
    """The recipe with its `scale: auto` replaced by the best on the tasks' validation splits."""
    from orthomerge.evaluation.scale import search_scale
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import open_experts

    for task in recipe.experts:
        if task not in data:
            raise RecipeError(f"'scale: auto' is chosen on validation data of every task; give --data {task}=PATH")
    search = search_scale(
        open_experts(recipe.opening).check(),
        recipe.method,
        {task: data[task] for task in recipe.experts},
        recipe.parameters,
        seed=recipe.seed,
        device=recipe.device,
        vector=recipe.vector,
        encoding=Encoding(None),
    )
    if not quiet:
        sys.stderr.write(f"{search.criterion} on validation data, by scale:\n{search.plot()}\n")
    return recipe.with_scale(search.best)
