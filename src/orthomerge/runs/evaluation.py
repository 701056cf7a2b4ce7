"""Scoring the models of a run, as the section `evaluate` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from orthomerge.api.evaluate import Reference, evaluate
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import Progress
from orthomerge.core.version import VERSION
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.running import FILES, drop_stale
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.runs.blocks import Evaluate
from orthomerge.runs.digests import Digests, digest_of
from orthomerge.runs.models import Places, merge_key, output_digest
from orthomerge.runs.protocols_of import protocols_of
from orthomerge.runs.recipe import Recipe

RECORDS = "records.jsonl"


def evaluate_key(recipe: Recipe, experts: Experts, places: Places, digests: Digests) -> str:
    """What the records depend on: the section, the data, all models, and the experts."""
    import torch

    section = section_of(recipe)
    options = {name: value for name, value in vars(section).items() if name not in ("data", "protocols")}
    return digest_of(
        [
            {"orthomerge": VERSION, "torch": torch.__version__},
            options,
            [vars(reading) for reading in section.readings],
            [(task, digests.source(source)) for task, source in section.data.items()],
            [output_digest(place) for place in (places.merged, places.aligned) if place is not None],
            merge_key(recipe, experts, digests),
        ]
    )


def evaluate_models(
    recipe: Recipe, experts: Experts, models: Mapping[str, Model], run: Path, progress: Progress
) -> list[Path]:
    """Score models by name, with base and experts, and write records, predictions, comparisons and tables."""
    section = section_of(recipe)
    scores = evaluate(
        models,
        section.data,
        protocols=protocols_of(recipe),
        experts=experts,
        references=references_of(recipe),
        against=section.against,
        margin=section.margin / 100,
        encoding=Encoding(device=section.device, batch=section.batch),
        progress=progress,
    )
    scores.write(run)
    return written_files(run, scores.records)


def references_of(recipe: Recipe) -> tuple[Reference, ...]:
    """What the models are scored beside."""
    if not section_of(recipe).references:
        return ()
    return ("expert",) if recipe.base is None else ("base", "expert")


def written_files(run: Path, records: Sequence[Record]) -> list[Path]:
    """All files of an evaluation; predictions that no record names are removed."""
    drop_stale(run, records)
    return [run / name for name in (*FILES, *(each.predictions for each in records if each.predictions is not None))]


def section_of(recipe: Recipe) -> Evaluate:
    """The section `evaluate`, without which nothing is scored."""
    if recipe.evaluate is None:
        raise RecipeError("the recipe has no section 'evaluate'; add one with the data of the tasks")
    return recipe.evaluate
