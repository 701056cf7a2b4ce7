"""Artifacts of a run: the merge, the merge with aligned heads, records, diagnosis, page.

The diagnosis is of the merge before alignment; it includes how much alignment recovers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orthomerge.core.version import VERSION
from orthomerge.evaluation.evaluate import Subject, references_of, score
from orthomerge.evaluation.records import Record, read_records
from orthomerge.evaluation.scale import scale_curve
from orthomerge.evaluation.scores import RECORDS
from orthomerge.files.run_state import clear_state, state_folder
from orthomerge.models.manifest import read_manifest
from orthomerge.models.writing import plain, rewrite_card
from orthomerge.runs.driver import Artifact
from orthomerge.runs.models import align, merge, write_weights
from orthomerge.runs.sections import Align, protocols_of
from orthomerge.runs.work import MODEL, Work, key_of, merge_key, section_content

PAGE = "report.html"


def run_artifacts(work: Work) -> Iterator[Artifact]:
    """Yield every artifact of a recipe without a sweep, in order."""
    recipe, places = work.recipe, model_places(work)
    merged = merge_key(recipe, work.experts_key)
    models = [merged]
    yield Artifact(merged, "merge", make_merge, options={"key": merged}, model=places[0])
    if recipe.align is not None:
        models.append(key_of("align", merged, section_content(recipe.align), recipe.seed))
        yield Artifact(models[-1], "align", make_aligned, (merged,), {"section": recipe.align}, model=places[1])
    if recipe.evaluate is None:
        return
    records = key_of("records", models, section_content(recipe.evaluate))
    yield Artifact(records, "evaluate", make_records, tuple(models), files=True)
    needs = [*models, records]
    if recipe.diagnose is not False:
        needs.append(key_of("diagnosis", records, asdict(recipe.diagnosis), recipe.seed))
        yield Artifact(needs[-1], "diagnose", make_diagnosis, (merged, records), {"where": str(places[0])}, files=True)
    yield from page_artifact(work, needs)


def model_places(work: Work) -> list[Path]:
    """Return the folders of the merge and of the aligned merge; the last is the recipe's `out` if it has one."""
    recipe = work.recipe
    names = [recipe.method] + ([f"{recipe.method}-{recipe.align.aligner}"] if recipe.align is not None else [])
    places = [work.run / "models" / name.replace("/", "_") for name in names]
    return places if recipe.out is None else [*places[:-1], Path(recipe.out).expanduser()]


def page_artifact(work: Work, needs: Sequence[str]) -> Iterator[Artifact]:
    """Yield the page of the run folder, if the recipe asks for one."""
    if work.recipe.report is not False:
        yield Artifact(key_of("page", needs, work.title, work.text), "report", make_page, tuple(needs), files=True)


def make_merge(place: Path, work: Work, *, key: str) -> None:
    """Merge or fit; an interrupted fit continues from its state beside the entry."""
    recipe, state = work.recipe, state_folder(work.store.content(key).parent, "fitting")
    model = merge(work.experts, recipe, state=state, progress=work.progress)
    write_weights(model, place / MODEL, recipe, progress=work.progress)
    clear_state(state)


def make_aligned(place: Path, work: Work, merged: str, *, section: Align) -> None:
    recipe = work.recipe
    model = align(work.model(merged), work.experts, section, seed=recipe.seed, progress=work.progress)
    write_weights(model, place / MODEL, recipe, progress=work.progress)


def make_records(place: Path, work: Work, *models: str) -> None:
    """Score models, base and experts; protocols that need the expert score only base and merge."""
    section, encoded = work.section, work.encoded
    references = references_of(work.experts, encoded.tasks).values() if section.references else ()
    subjects = [*references, *(Subject.of(work.model(key), encoded.tasks) for key in models)]
    protocols = [
        replace(protocol, models=("base", work.recipe.method)) if "expert" in protocol.needs else protocol
        for protocol in protocols_of(section.scorings, section.support)
    ]
    score(subjects, protocols, encoded, against=section.against, margin=section.margin / 100).write(place)


def make_diagnosis(place: Path, work: Work, merged: str, records: str, *, where: str) -> None:
    """Diagnose the merge. `where`: its folder, for the commands that the verdict suggests."""
    from orthomerge.analysis.diagnose import diagnose, suggested_commands
    from orthomerge.analysis.diagnosis import FILE, write_diagnosis

    seed, data, encoded, search = work.recipe.seed, work.section.data, work.encoded, None
    if work.recipe.diagnosis.scales:
        search = scale_curve(work.experts, data, seed=seed, encoding=encoded.how, progress=work.progress)
    detail = work.recipe.diagnosis.detail(seed=seed % 2**32)
    in_files = all(isinstance(source, str) for source in data.values())
    diagnosis = diagnose(
        work.model(merged),
        work.experts,
        encoded.tasks,
        detail=detail,
        records=read_records(work.folder(records) / RECORDS),
        search=search,
        commands=suggested_commands(where, data, work.experts, aligner=detail.aligner) if in_files else {},
        how=encoded.how,
        progress=work.progress,
    )
    write_diagnosis(place / FILE, diagnosis)


def make_page(place: Path, work: Work, *_: str) -> None:
    """Write the page of the run folder, if anything was scored."""
    from orthomerge.reporting.report import report

    if (work.run / RECORDS).stat().st_size:
        report(work.run, place / PAGE, title=work.title, progress=work.progress)


def place_scores(out: Path, title: str, records: Sequence[Record]) -> None:
    """Write the scores of the model called `title` on its card."""
    evaluation = evaluation_of(title, records)
    if read_manifest(out).get("evaluation") != plain(evaluation):
        rewrite_card(out, evaluation)


def evaluation_of(title: str, records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the block `evaluation` of a manifest: scores by `current` beside base and experts; None without scores."""
    current = [record for record in records if record.protocol == "current" and record.aligner is None]
    scores = [record for record in current if record.method == title]
    if not scores:
        return None
    tasks: dict[str, dict[str, Any]] = {
        record.task: {name: getattr(record, name) for name in ("value", "low", "high", "examples")} for record in scores
    }
    for record in current:
        if record.method in ("expert", "base") and record.task in tasks:
            tasks[record.task][record.method] = record.value
    shared = {name: getattr(scores[0], name) for name in ("metric", "split", "access")}
    return {"orthomerge": VERSION, **shared, "tasks": tasks}
