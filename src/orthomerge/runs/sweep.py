"""Artifacts of a sweep: scores of every model, tables over all models, page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from orthomerge.core.errors import OrthomergeError, OutputError
from orthomerge.core.schema import build
from orthomerge.evaluation.comparisons import Predictions, compare_records
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Subject, contamination_notes, evaluate, references_of
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.records import Record, write_records
from orthomerge.evaluation.scores import Scores, put_predictions, read_predictions
from orthomerge.evaluation.tables import lines
from orthomerge.files.publish import check_room
from orthomerge.merging.merge import DTYPE_NAMES
from orthomerge.models.manifest import record_of
from orthomerge.models.model import Model
from orthomerge.models.model_data import loaded
from orthomerge.models.saved import read_model
from orthomerge.runs.choosing import Best, Failure, Row, best_of, rows_of, sweep_csv, sweep_markdown
from orthomerge.runs.driver import Artifact
from orthomerge.runs.models import merge, write_weights
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.steps import page_artifact
from orthomerge.runs.variants import REFERENCES, Variant, cells_of, protocols_for, splits_of, sweep_of, variants_of
from orthomerge.runs.work import MODEL, Work, key_of, merge_key, section_content

MERGES = "merges"
RESULT = "result.json"  # scores of one model
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.+=@-]+")
_LONGEST = 100  # characters of a model's file name


@dataclass(frozen=True)
class Result:
    """Scores of one model on test and val, and its failures. `facts`: how the model was made, for a report."""

    records: tuple[Record, ...] = ()
    validation: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Swept:
    """Outcome of a sweep. `references`: accuracies of base and experts. `done`, `found`: models scored now, before."""

    cells: int
    rows: list[Row]
    best: list[Best]
    failures: list[Failure]
    references: dict[str, float]
    done: int = 0
    found: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "cells": self.cells,
            "models": {"done": self.done, "found": self.found},
            "best": [best.as_dict() for best in self.best],
            "failed": [{"cell": failure.title, "message": failure.message} for failure in self.failures],
        }


def sweep_artifacts(work: Work) -> Iterator[Artifact]:
    """Yield every artifact of a recipe with a sweep, in order."""
    recipe, (sweep, section) = work.recipe, sweep_of(work.recipe)
    splits, scores = splits_of(sweep, section.support, work.encoded.tasks), list[str]()
    content = section_content(section)
    for name, variant in _models(recipe).items():
        keep = sweep.keep and name not in REFERENCES
        merged = merge_key(variant.recipe(recipe), work.experts_key)
        protocols = [asdict(protocol) for protocol in protocols_for(recipe, variant)]
        scores.append(key_of("scores", merged, asdict(variant), content, protocols, splits, keep))
        options = {"variant": variant, "splits": splits, "keep": keep}
        yield Artifact(scores[-1], name, make_scores, (), options, work.run / MERGES / name if keep else None)
    tables = key_of("sweep", scores, section.against, section.margin, work.title)
    yield Artifact(tables, "sweep", make_tables, tuple(scores), files=True)
    yield from page_artifact(work, [tables])


def _models(recipe: Recipe) -> dict[str, Variant]:
    """Return references, then merges, by valid file names."""
    sweep, section = sweep_of(recipe)
    models = dict[str, Variant]()
    if section.references:
        models["expert"] = Variant("expert")
        if recipe.base is not None:
            models["base"] = Variant("base", seeds=sweep.seeds)
    for variant in variants_of(recipe):
        seed = f"-seed{variant.first}" if variant.seeds == 1 and variant.first else ""
        name = f"{_NOT_IN_NAMES.sub('-', variant.name)[:_LONGEST]}{seed}"
        models[name if name not in models else f"{name}-{key_of(asdict(variant))[:8]}"] = variant
    return models


def check_space(work: Work, artifacts: Iterable[Artifact]) -> str:
    """Describe the work to do; refuse models to keep that do not fit on the disk."""
    models = [item for item in artifacts if item.make is make_scores and work.store.get(item.key) is None]
    kept = sum(artifact.model is not None for artifact in models)
    size = kept * sum(spec.cast(DTYPE_NAMES.get(work.recipe.dtype)).nbytes for spec in work.experts.specs.values())
    check_room(work.run, size)
    room = f", and {size / 1e9:.2f} GB in {work.run} for {kept} models to keep" if kept else ""
    cells, merges = len(cells_of(work.recipe)), len(variants_of(work.recipe))
    return f"{cells} cells from {merges} merges; {len(models)} models to score{room}"


def results_of(work: Work, keys: Iterable[str]) -> list[Result]:
    paths = (work.folder(key) / RESULT for key in keys)
    return [build(Result, json.loads(path.read_text(encoding="utf-8")), where=str(path)) for path in paths]


def swept_of(work: Work, results: Sequence[Result]) -> Swept:
    """Collect the outcome of a sweep from the scores of all models."""
    cells = cells_of(work.recipe)
    records = [record for result in results for record in result.records]
    validation = [record for result in results for record in result.validation]
    failures = [failure for result in results for failure in result.failures]
    rows = rows_of(cells, records, validation, failures)
    failed = {(failure.name, failure.way) for failure in failures}
    current = [line for line in lines(records) if line.way.title == "current" and (line.method, line.way) not in failed]
    references = {line.method: line.mean for line in current if line.method in REFERENCES}
    return Swept(len(cells), rows, best_of(rows), failures, references)


def make_scores(place: Path, work: Work, *, variant: Variant, splits: tuple[str, ...], keep: bool) -> None:
    """Score a merge, the base or the experts by every protocol on every split, and write scores and failures."""
    protocols = protocols_for(work.recipe, variant)
    if variant.name == "expert":
        protocols = [protocol for protocol in protocols if "expert" not in protocol.needs]
    cells = [Failure(variant.name, protocol.way(variant.seen), "") for protocol in protocols]
    records: dict[str, list[Record]] = {"test": [], "val": []}
    failures, facts, subject = list[Failure](), dict[str, Any](), Subject(variant.name, {})
    encoded = {split: work.encoded if split == "test" else _on_validation(work.encoded) for split in splits}
    with _recording(failures, *cells):
        subject = _subject(work, variant, place if keep else None)
    scored = zip(protocols, cells, strict=True)
    for (task, model), (protocol, cell), split in product(subject.models.items(), scored, splits):
        with _recording(failures, replace(cell, place=f"{task}/{split}")):
            alone = replace(subject, models={task: model})
            records[split] += _records(place, alone, [protocol], encoded[split], split=split)
    if subject.models and variant.name != "expert":
        with _recording(failures):  # the joint label space
            joint = _records(place, subject, [], encoded["test"])
            records["test"] += [replace(record, seed=variant.first) for record in joint]
            facts = {} if variant.name == "base" else _facts(next(iter(subject.models.values())))
    result = Result(tuple(records["test"]), tuple(records["val"]), tuple(failures), facts)
    (place / RESULT).write_text(json.dumps(asdict(result), ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _recording(failures: list[Failure], *cells: Failure) -> Iterator[None]:
    """Record an error of the block for these cells; an output that cannot be written ends the sweep."""
    try:
        yield
    except OutputError:
        raise
    except OrthomergeError as error:
        failures += [replace(cell, message=str(error)) for cell in cells]


def _subject(work: Work, variant: Variant, kept: Path | None) -> Subject:
    """Return the subject to score, with its weights computed. `kept`: a folder to write the model to."""
    tasks, experts, recipe = work.encoded.tasks, work.experts, work.recipe
    if variant.name in REFERENCES:
        return references_of(experts, tasks)[variant.name]
    work.progress.stage("merging", None)
    model = merge(experts, variant.recipe(recipe), progress=work.progress)
    if kept is not None:
        write_weights(model, kept / MODEL, recipe, progress=work.progress)
        model = replace(read_model(kept / MODEL), origin=model.origin)  # not computed again
    loaded(model.encoder)  # computes the weights, which are then kept while the model is scored
    return replace(Subject.of(model, tasks), name=variant.name)


def _records(
    place: Path, subject: Subject, protocols: list[EvaluationProtocol], encoded: EncodedTasks, *, split: str = "test"
) -> list[Record]:
    """Score by protocols, or in the joint label space if there are none; predictions on test are written."""
    scored = list(evaluate([subject], protocols, encoded))
    if split != "test":
        return [replace(item.record, split=split, predictions=None) for item in scored]
    put_predictions(place, {str(item.record.predictions): item.predictions for item in scored})
    return [item.record for item in scored]


def _facts(model: Model) -> dict[str, Any]:
    facts = {name: value for name, value in model.origin.facts.items() if name in ("method", "fit", "seed")}
    heads = {task: {"labels": list(labels)} for task, labels in model.labels.items()}
    return {**facts, "inputs": record_of(model)["inputs"], "heads": heads, "family": model.family.name}


def _on_validation(encoded: EncodedTasks) -> EncodedTasks:
    """Put the val splits in the place of the test splits, which are then out of reach."""
    tasks = {
        name: replace(task, splits={**task.splits, "test": replace(task["val"], split="test")})
        for name, task in encoded.tasks.items()
    }
    return replace(encoded, tasks=tasks)


def make_tables(place: Path, work: Work, *scores: str) -> None:
    """Write records, comparisons, notes and tables of all scores, without rows that failed on any task."""
    section, results = work.section, results_of(work, scores)
    swept = swept_of(work, results)
    failed = {(failure.name, failure.way) for failure in swept.failures}
    records, predictions = list[Record](), dict[str, Predictions]()
    for key, result in zip(scores, results, strict=True):
        scored = [record for record in result.records if (record.method, record.way) not in failed]
        predictions |= {str(record.predictions): read_predictions(work.folder(key), record) for record in scored}
        records += scored
    against = section.against if any(record.method == section.against for record in records) else None
    comparisons = compare_records(records, predictions, against=against, margin=section.margin / 100)
    count = f"{len(swept.rows)} rows were scored on the same test inputs"
    notes = [*contamination_notes(work.encoded), f"{count}, so the best row is the best in hindsight; see sweep.md"]
    if failed:
        notes.append(f"{len(failed)} rows failed on some task and are left out; see sweep.md")
    Scores(records, comparisons, notes, predictions).write(place)
    write_records(place / "validation.jsonl", [record for result in results for record in result.validation])
    (place / "sweep.csv").write_bytes(sweep_csv(swept.rows, list(section.data)).encode())
    (place / "sweep.md").write_bytes(sweep_markdown(swept.rows, swept.best, swept.failures, swept.references).encode())
