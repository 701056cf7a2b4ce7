"""How closely a recipe's section `diagnose` asks to look."""

from __future__ import annotations

from orthomerge.analysis.looks import Looks
from orthomerge.core.errors import RecipeError
from orthomerge.runs.blocks import Diagnose
from orthomerge.runs.recipe import Recipe


def looks_of(recipe: Recipe) -> Looks:
    """The section's own aligner, else that of `align`, else auto; the rest as it says."""
    section = _section(recipe)
    if section.scales and recipe.base is None:
        raise RecipeError("'scales' merges anew, which needs a base; give 'base', or leave 'scales' out")
    return Looks(
        aligner=section.aligner or ("auto" if recipe.align is None else recipe.align.aligner),
        points=section.points,
        layers=section.layers,
        maps=section.maps,
        probe=section.probe,
        limit=section.limit,
        seed=recipe.seed % 2**32,
    )


def wants_scales(recipe: Recipe) -> bool:
    """Whether a curve over scales is wanted too."""
    return _section(recipe).scales


def _section(recipe: Recipe) -> Diagnose:
    return recipe.diagnose if isinstance(recipe.diagnose, Diagnose) else Diagnose()
