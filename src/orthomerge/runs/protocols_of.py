"""The protocols that a recipe's section `evaluate` asks for."""

from __future__ import annotations

from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.protocol import EvaluationProtocol
from orthomerge.runs.blocks import Evaluate, Reading
from orthomerge.runs.recipe import Recipe


def protocols_of(recipe: Recipe) -> list[EvaluationProtocol]:
    """Every name and option must exist.

    Neither an expert is aligned with itself, nor a model whose heads have been aligned once more.
    """
    section = recipe.evaluate
    if section is None:
        raise RecipeError("the recipe has no section 'evaluate'; add one with the data of the tasks")
    return [protocol for reading in section.readings for protocol in _protocols(reading, recipe.method, section)]


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
