"""The artifacts of a sweep: the scores of every model, the tables over all of them, the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orthomerge.core.schema import build
from orthomerge.evaluation.notes import contamination_notes
from orthomerge.evaluation.records import Record, write_records
from orthomerge.evaluation.scores import Scores, compare_run, put_records, write_derived
from orthomerge.evaluation.tables import lines
from orthomerge.files.publish import check_room
from orthomerge.merging.merged import DTYPE_NAMES
from orthomerge.runs.driver import Artifact
from orthomerge.runs.keys import key_of, merge_key, section_content
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.steps import page_artifact
from orthomerge.runs.sweeping.cells import (
    REFERENCES,
    Variant,
    cells_of,
    readouts_of,
    splits_of,
    sweep_of,
    variants_of,
)
from orthomerge.runs.sweeping.choosing import Best, Failure, Row, best_of, rows_of, sweep_csv, sweep_markdown
from orthomerge.runs.sweeping.scoring import RESULT, Result, encoded_by_split, make_kept, make_scores
from orthomerge.runs.work import Work

MERGES = "merges"
_ODD = re.compile(r"[^A-Za-z0-9_.+=@-]+")
_LONGEST = 100  # letters of a model's name in files


@dataclass(frozen=True)
class Swept:
    """What a sweep came to. `rows`: every merge under every reading; `best`: for each budget of inputs.

    `done` and `found`: how many models were scored now, and how many had been before.
    """

    cells: int
    rows: list[Row]
    best: list[Best]
    failures: list[Failure]
    done: int = 0
    found: int = 0


def sweep_artifacts(work: Work) -> Iterator[Artifact]:
    """Every artifact of a recipe with a sweep, in order."""
    recipe, (block, scored) = work.recipe, sweep_of(work.recipe)
    splits = splits_of(block, scored)
    shared = [section_content(scored), [asdict(readout) for readout in readouts_of(recipe)], splits]
    needs = []
    for name, variant in _models(recipe).items():
        is_merge = name not in REFERENCES
        merged = merge_key(recipe, variant.merge(recipe) if is_merge else recipe.merge, work.experts)
        kept = key_of("kept", merged) if is_merge and block.keep else None
        if kept is not None:
            yield Artifact(kept, f"keep {name}", "kept", make_kept, arguments={"variant": variant})
        needs.append(key_of("scores", merged, asdict(variant), shared))
        arguments = {"variant": variant, "splits": splits, "kept": kept}
        yield Artifact(needs[-1], name, "scores", make_scores, () if kept is None else (kept,), arguments)
    tables = key_of("sweep", needs, scored.against, scored.margin, work.title)
    yield Artifact(tables, "sweep", "files", make_tables, tuple(needs), {"splits": splits, "scores": tuple(needs)})
    if recipe.report is not False:
        yield page_artifact(work, [tables])


def _models(recipe: Recipe) -> dict[str, Variant]:
    """What is scored, by names that files can have: references, then merges."""
    block, scored = sweep_of(recipe)
    models = dict[str, Variant]()
    if scored.references:
        models["expert"] = Variant("expert")
        if recipe.base is not None:
            models["base"] = Variant("base", seeds=block.seeds)
    for variant in variants_of(recipe):
        seed = f"-seed{variant.first}" if variant.seeds == 1 and variant.first else ""
        name = f"{_ODD.sub('-', variant.name)[:_LONGEST]}{seed}"
        models[name if name not in models else f"{name}-{key_of(asdict(variant))[:8]}"] = variant
    return models


def check_space(work: Work, artifacts: Iterable[Artifact]) -> str:
    """Say how much there is to do, and refuse what the disk cannot hold."""
    missing = [artifact for artifact in artifacts if work.store.get(artifact.key) is None]
    merges = [artifact for artifact in missing if artifact.kind == "kept"]
    dtype = DTYPE_NAMES.get(work.recipe.dtype)
    size = len(merges) * sum(spec.cast(dtype).nbytes for spec in work.experts.specs.values())
    check_room(work.run, size)
    room = f", and {size / 1e9:.2f} GB in {work.run} for {len(merges)} models to keep" if merges else ""
    models = sum(artifact.kind == "scores" for artifact in missing)
    count = len(variants_of(work.recipe))
    return f"{len(cells_of(work.recipe))} cells from {count} merges; {models} models to score{room}"


def results_of(work: Work, keys: Iterable[str]) -> list[Result]:
    """The scores of models, read back."""
    paths = (work.folder(key) / RESULT for key in keys)
    return [build(Result, json.loads(path.read_text(encoding="utf-8")), where=str(path)) for path in paths]


def swept_of(work: Work, scores: Sequence[str]) -> Swept:
    """What a sweep came to, from the keys of its scores."""
    cells, results = cells_of(work.recipe), results_of(work, scores)
    records, validation, failures = _joined(results)
    rows = rows_of(cells, records, validation, failures)
    return Swept(len(cells), rows, best_of(rows), failures)


def facts_of(work: Work, scores: Iterable[str]) -> list[dict[str, Any]]:
    """How every merge was made, for the report."""
    return [result.facts for result in results_of(work, scores) if result.facts]


def make_tables(place: Path, work: Work, *, splits: tuple[str, ...], scores: tuple[str, ...]) -> None:
    """Write records, comparisons, notes and tables over all scores; rows that failed somewhere are left out."""
    _, scored = sweep_of(work.recipe)
    results = results_of(work, scores)
    records, validation, failures = _joined(results)
    swept = swept_of(work, scores)
    failed = {(failure.name, failure.way) for failure in failures}
    whole = [record for record in records if (record.method, record.way) not in failed]
    put_records(place, whole, {})
    write_records(place / "validation.jsonl", validation)
    wanted = {record.predictions for record in whole}
    for key, result in zip(scores, results, strict=True):
        for name in {record.predictions for record in result.records} & wanted:
            (place / str(name)).write_bytes((work.folder(key) / str(name)).read_bytes())
    against = scored.against if any(record.method == scored.against for record in whole) else None
    comparisons = compare_run(place, against=against, margin=scored.margin / 100)
    notes = [*contamination_notes(encoded_by_split(work, splits)["test"]), *_notes(swept)]
    write_derived(place, Scores(whole, comparisons, notes))
    csv = sweep_csv(swept.rows, swept.best, list(scored.data))
    markdown = sweep_markdown(swept.rows, swept.best, failures, _references(whole))
    (place / "sweep.csv").write_bytes(csv.encode())
    (place / "sweep.md").write_bytes(markdown.encode())


def _joined(results: Sequence[Result]) -> tuple[list[Record], list[Record], list[Failure]]:
    """The records on test and val and the failures of all models."""
    return (
        [record for result in results for record in result.records],
        [record for result in results for record in result.validation],
        [failure for result in results for failure in result.failures],
    )


def _notes(swept: Swept) -> list[str]:
    where = "sweep.md has those that validation chose" if any(item.chosen for item in swept.best) else "see sweep.md"
    count = f"{len(swept.rows)} ways to merge and read were scored on the same test inputs, so the best row of a table"
    notes = [f"{count} is the best in hindsight; {where}"]
    failed = {(failure.name, failure.way) for failure in swept.failures}
    return notes + ([f"{len(failed)} of them failed on some task and are left out; see sweep.md"] if failed else [])


def _references(records: Sequence[Record]) -> dict[str, float]:
    return {
        line.method: line.mean
        for line in lines(records)
        if line.method in REFERENCES and line.protocol == "current" and line.way.aligner is None
    }
