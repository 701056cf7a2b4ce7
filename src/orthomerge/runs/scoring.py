"""What the sections `evaluate` and `diagnose` of a recipe ask for."""

from __future__ import annotations

from orthomerge.analysis.detail import Detail
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.runs.blocks import Diagnose, Evaluate, Reading
from orthomerge.runs.recipe import Recipe


def protocols_of(section: Evaluate, method: str) -> list[EvaluationProtocol]:
    """Every protocol that a section names; names and options must exist.

    Neither an expert is aligned with itself, nor a model whose heads have been aligned once more.
    """
    return [protocol for reading in section.readings for protocol in _protocols(reading, method, section)]


def _protocols(reading: Reading, method: str, section: Evaluate) -> list[EvaluationProtocol]:
    protocols = [
        EvaluationProtocol(
            reading.protocol,
            reading.options,
            shots,
            1 if shots is None else reading.seeds,
            access,
            section.support,
            aligner,
        )
        for aligner in reading.aligners
        for shots in reading.counts
        for access in reading.kinds
    ]
    for protocol in protocols:
        protocol.builder()  # checks its options
    if not protocols[0].needs:
        return [EvaluationProtocol(reading.protocol, reading.options)]
    if "expert" not in protocols[0].needs:
        return protocols
    return [EvaluationProtocol(**{**vars(protocol), "models": ("base", method)}) for protocol in protocols]


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
