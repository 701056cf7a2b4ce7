"""What the sections `evaluate` and `diagnose` of a recipe ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from orthomerge.analysis.detail import Detail
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Diagnose, Scoring, listed

if TYPE_CHECKING:
    from orthomerge.data.task import Split


def protocols_of(scorings: Iterable[Scoring], support: Split) -> list[EvaluationProtocol]:
    """Every protocol that a section names, each once; names and options must exist."""
    protocols = list[EvaluationProtocol]()
    for scoring in scorings:
        for aligner, shots, access in product(listed(scoring.aligner), listed(scoring.shots), listed(scoring.access)):
            protocol = EvaluationProtocol(scoring.protocol, scoring.options, aligner=aligner)
            protocol.builder()  # checks names and options
            if protocol.needs:
                drawn = {} if shots == "all" else {"shots": shots, "seeds": scoring.seeds}
                protocol = replace(protocol, access=access, support=support, **drawn)
            if protocol not in protocols:
                protocols.append(protocol)
    return protocols


def teaches(protocol: EvaluationProtocol) -> bool:
    """Whether a protocol looks at the expert, so that an expert is not scored by it."""
    return "expert" in protocol.needs


def diagnose_of(recipe: Recipe) -> Diagnose:
    """The section `diagnose`, with defaults if it is only `true`."""
    return recipe.diagnose if isinstance(recipe.diagnose, Diagnose) else Diagnose()


def detail_of(recipe: Recipe) -> Detail:
    """How closely to look: the section's own aligner, else that of `align`, else auto; the rest as it says."""
    section = diagnose_of(recipe)
    if section.scales and recipe.base is None:
        raise RecipeError("'scales' merges anew, which needs a base; give 'base', or leave 'scales' out")
    return Detail(
        aligner=section.aligner or ("auto" if recipe.align is None else recipe.align.aligner),
        points=section.points,
        layers=section.layers,
        maps=section.maps,
        probe=section.probe,
        limit=section.limit,
        seed=recipe.seed % 2**32,
    )
