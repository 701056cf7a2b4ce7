"""Scoring the models of a run: the block `evaluate` as tasks, subjects and questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orthomerge.aligning import chosen_aligner
from orthomerge.blocks import Evaluate, Reading
from orthomerge.data.labels import match_labels
from orthomerge.data.processing import load_processor
from orthomerge.data.reading import read_task
from orthomerge.data.task import Task
from orthomerge.errors import RecipeError
from orthomerge.evaluation.evaluate import Bench, Question, Subject
from orthomerge.evaluation.protocols import find_protocol, make_protocol
from orthomerge.evaluation.running import run_evaluation
from orthomerge.evaluation.subjects import output_subject
from orthomerge.manifest import read_manifest
from orthomerge.recipe import Recipe
from orthomerge.records import Record
from orthomerge.running.digests import Digests, digest_of
from orthomerge.running.models import Places, output_digest
from orthomerge.version import VERSION

__all__ = ["RECORDS", "bench_of", "evaluate_key", "evaluate_models", "questions_of", "subjects_of", "written_files"]

RECORDS = "records.jsonl"
_WRITTEN = (RECORDS, "comparisons.json", "notes.json", "table.md")


def questions_of(recipe: Recipe) -> list[Question]:
    """What the block `evaluate` asks; every name and option must exist.

    Neither an expert is aligned with itself, nor a model whose heads have been aligned once more.
    """
    block = _block(recipe)
    return [question for reading in block.readings for question in _asked(reading, recipe, block)]


def _asked(reading: Reading, recipe: Recipe, block: Evaluate) -> list[Question]:
    if reading.aligner is None:
        make_protocol(reading.protocol, reading.options)
        if not find_protocol(reading.protocol).needs:
            return [Question(reading.protocol, options=reading.options)]
    for aligner in filter(None, reading.aligners):
        chosen_aligner(aligner, reading.options, seed=recipe.seed)
    found = [
        Question(
            reading.protocol,
            shots=shots,
            seeds=1 if shots is None else reading.seeds,
            access=kind,
            support=block.support,
            options=reading.options,
            aligner=aligner,
        )
        for aligner in reading.aligners
        for shots in reading.counts
        for kind in reading.kinds
    ]
    if not found[0].needs & {"teacher", "expert"}:
        return found
    return [replace(question, subjects=("base", recipe.method)) for question in found]


def bench_of(recipe: Recipe, places: Places, *, say: Callable[[str], None] = lambda text: None) -> Bench:
    """The tasks of the block `evaluate`, read as the merged model reads them."""
    block, heads = _block(recipe), read_manifest(places.merged)["heads"]
    tasks = {task: _task(task, source, tuple(heads[task]["labels"])) for task, source in block.data.items()}
    modality = next(iter(tasks.values())).modality
    return Bench(
        tasks,
        load_processor(places.merged / "encoder", modality=modality),
        teachers=places.experts,
        device=block.device,
        batch=block.batch,
        progress=say,
    )


def _task(name: str, source: str | Task, labels: tuple[str, ...]) -> Task:
    found = read_task(source) if isinstance(source, str) else source
    return match_labels(replace(found, name=name), labels)


def subjects_of(recipe: Recipe, places: Places) -> list[Subject]:
    """What is scored: base and experts unless they are not wanted, the merge, and the same with its heads aligned."""
    block = _block(recipe)
    tasks, found = list(block.data), list[Subject]()
    if places.base is not None:
        found.append(Subject("base", dict.fromkeys(tasks, places.base)))
    if block.references:
        found.append(Subject("expert", places.experts))
    found.append(output_subject(places.merged, tasks))
    if places.aligned is not None:
        found.append(output_subject(places.aligned, tasks))
    return found


def evaluate_key(recipe: Recipe, places: Places, digests: Digests) -> str:
    """What the records depend on: the block, the data and all models."""
    import torch

    block = _block(recipe)
    options = {name: value for name, value in vars(block).items() if name not in ("data", "protocols")}
    models = {
        subject.name: {task: output_digest(model) for task, model in subject.models.items()}
        for subject in subjects_of(recipe, places)
    }
    return digest_of(
        [
            {"orthomerge": VERSION, "torch": torch.__version__},
            options,
            [vars(reading) for reading in block.readings],
            [(task, digests.source(source)) for task, source in block.data.items()],
            models,
            {task: output_digest(folder) for task, folder in places.experts.items()},
        ]
    )


def evaluate_models(
    recipe: Recipe, places: Places, run: Path, *, say: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """Score everything and write records, predictions, comparisons and tables; what was written."""
    block = _block(recipe)
    records = run_evaluation(
        bench_of(recipe, places, say=say),
        subjects_of(recipe, places),
        questions_of(recipe),
        out=run,
        against=block.against,
        margin=block.margin / 100,
    )
    return written_files(run, records)


def written_files(run: Path, records: list[Record]) -> list[Path]:
    """All files of an evaluation; predictions that no record names are removed."""
    kept = _predictions(run, records)
    for stale in set((run / "predictions").glob("*.npz")) - set(kept):
        stale.unlink()
    return [*(run / name for name in _WRITTEN), *kept]


def _predictions(run: Path, records: list[Record]) -> list[Path]:
    return [run / record.predictions for record in records if record.predictions is not None]


def _block(recipe: Recipe) -> Evaluate:
    if recipe.evaluate is None:
        raise RecipeError("the recipe has no block 'evaluate'; add one with the data of the tasks")
    return recipe.evaluate
