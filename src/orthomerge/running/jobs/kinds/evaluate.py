"""One model scored on one task with one seed by every reading, or, without a task, on all labels in one space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orthomerge.errors import RecipeError
from orthomerge.evaluation.evaluate import Subject
from orthomerge.evaluation.running import run_evaluation
from orthomerge.evaluation.subjects import output_subject
from orthomerge.recipe import Recipe
from orthomerge.running.evaluation import bench_of
from orthomerge.running.jobs.context import Context
from orthomerge.running.jobs.questions import asked, of_seed
from orthomerge.running.models import Places

__all__ = ["evaluate"]


def evaluate(context: Context, folder: Path) -> None:
    """Write a run folder of one row: records and predictions."""
    spec, places = context.job.spec, context.places
    tasks = (spec["task"],) if spec["task"] else tuple(places.experts)
    recipe = _only(context.recipe, tasks)
    context.check_data(() if recipe.evaluate is None else recipe.evaluate.data.values())
    teachers = {spec["task"]: places.experts[spec["task"]]} if spec["task"] else {}
    bench = bench_of(recipe, replace(places, experts=teachers))
    subject = _subject(places, spec["subject"], tasks)
    questions = of_seed(asked(recipe, spec["subject"]), spec["seed"]) if spec["task"] else []
    run_evaluation(bench, [subject], questions, out=folder)


def _only(recipe: Recipe, tasks: tuple[str, ...]) -> Recipe:
    """The recipe with the data of some tasks."""
    block = recipe.evaluate
    if block is None:
        raise RecipeError("the recipe has no block 'evaluate', but the plan scores; plan again")
    return replace(recipe, evaluate=replace(block, data={task: block.data[task] for task in tasks}))


def _subject(places: Places, role: str, tasks: tuple[str, ...]) -> Subject:
    """`role`: base, expert, merged or aligned; called as in a run that is not cut."""
    if role == "expert":
        return Subject(role, {task: places.experts[task] for task in tasks})
    model = {"base": places.base, "aligned": places.aligned, "merged": places.merged}[role]
    if model is None:
        raise RecipeError(f"the plan scores the model {role!r}, which the recipe does not have; plan again")
    return Subject(role, dict.fromkeys(tasks, model)) if role == "base" else output_subject(model, tasks)
