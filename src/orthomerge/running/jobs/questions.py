"""Which questions a model of a run is asked, seed by seed, and their records in the order of a run that is not cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from orthomerge.evaluation.evaluate import Question
from orthomerge.recipe import Recipe
from orthomerge.records import Record
from orthomerge.running.evaluation import questions_of

__all__ = ["asked", "in_order", "of_seed"]


def asked(recipe: Recipe, role: str) -> list[Question]:
    """The questions of the recipe for base, expert, merged or aligned."""
    aligner = "" if recipe.align is None else recipe.align.aligner
    name = {"merged": recipe.method, "aligned": f"{recipe.method} + {aligner}"}.get(role, role)
    return [question for question in questions_of(recipe) if question.subjects is None or name in question.subjects]


def of_seed(questions: Sequence[Question], seed: int) -> list[Question]:
    """Those that draw with this seed, for this seed alone; what draws nothing is asked with the first."""
    return [replace(question, first=seed, seeds=1) for question in questions if seed < question.seeds]


def in_order(questions: Sequence[Question], by_seed: Sequence[Sequence[Record]]) -> Iterator[Record]:
    """Records of one model on one task, question by question and then seed by seed."""
    found = [iter(records) for records in by_seed]
    for question in questions:
        for seed in range(question.seeds):
            yield next(found[seed])
