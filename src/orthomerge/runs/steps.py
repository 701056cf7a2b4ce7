"""The artifacts of a run: the merge, the same with aligned heads, records, diagnosis, page.

If the recipe aligns heads, the merge before that is diagnosed: the diagnosis says what aligning is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from orthomerge.files.run_state import clear_state, state_folder
from orthomerge.runs.driver import Artifact
from orthomerge.runs.keys import key_of, merge_key, section_content
from orthomerge.runs.models import align, input_paths, merge
from orthomerge.runs.recipe import Merge
from orthomerge.runs.work import Work

PAGE, RECORDS = "report.html", "records.jsonl"
_GRID = [step / 10 for step in range(1, 11)]


def run_artifacts(work: Work) -> Iterator[Artifact]:
    """Every artifact of a recipe without a sweep, in order."""
    recipe = work.recipe
    key = merge_key(recipe, recipe.merge, work.experts)
    merged = Artifact(key, "merge", "model", make_merge, arguments={"part": recipe.merge, "key": key})
    yield merged
    models = [merged.key]
    if recipe.align is not None:
        models.append(key_of("align", merged.key, section_content(recipe.align), recipe.seed))
        yield Artifact(models[-1], "align", "model", make_aligned, (merged.key,), {"merged": merged.key})
    if recipe.evaluate is None:
        return
    options = [section_content(recipe.evaluate), [asdict(reading) for reading in recipe.evaluate.readings]]
    records = key_of("records", models, options)
    yield Artifact(records, "evaluate", "files", make_records, tuple(models), {"models": models})
    needs = [*models, records]
    if recipe.diagnose is not False:
        from orthomerge.runs.scoring import detail_of, diagnose_of

        needs.append(key_of("diagnosis", records, asdict(detail_of(recipe)), diagnose_of(recipe).scales))
        arguments = {"merged": merged.key, "records": records, "where": str(model_places(work)[0])}
        yield Artifact(needs[-1], "diagnose", "files", make_diagnosis, (merged.key, records), arguments)
    if recipe.report is not False:
        yield page_artifact(work, needs)


def model_places(work: Work) -> list[Path]:
    """Where the models of a run are: the merge, and the same with aligned heads; the last one at the recipe's `out`."""
    recipe = work.recipe
    names = [recipe.method] + ([f"{recipe.method}-{recipe.align.aligner}"] if recipe.align is not None else [])
    places = [work.run / "models" / name.replace("/", "_") for name in names]
    return places if recipe.out is None else [*places[:-1], Path(recipe.out).expanduser()]


def page_artifact(work: Work, needs: Sequence[str]) -> Artifact:
    """The page over everything that the run folder holds."""
    return Artifact(key_of("page", needs, work.title, work.text), "report", "page", make_page, tuple(needs))


def make_merge(place: Path, work: Work, *, part: Merge, key: str) -> None:
    """Merge or fit; a fit that was killed continues from its state beside the entry."""
    from orthomerge.models.writing import write_model

    recipe, state = work.recipe, state_folder(work.store.content(key).parent, "fitting")
    model = merge(work.experts, part, recipe.compute, state=state, progress=work.progress)
    work.progress.stage("merging", sum(spec.nbytes for spec in model.weights.specs.values()))
    size, inputs = recipe.target.max_shard_size, input_paths(recipe)
    write_model(model, place, force=True, max_shard_size=size, inputs=inputs, progress=work.progress.advance)
    clear_state(state)


def make_aligned(place: Path, work: Work, *, merged: str) -> None:
    """Align the heads of the merge."""
    from orthomerge.models.writing import write_model

    recipe = work.recipe
    assert recipe.align is not None  # noqa: S101 - for mypy: there is no such artifact without
    model = align(work.model(merged), work.experts, recipe.align, seed=recipe.seed, progress=work.progress)
    write_model(model, place, force=True, max_shard_size=recipe.target.max_shard_size, inputs=input_paths(recipe))


def make_records(place: Path, work: Work, *, models: Sequence[str]) -> None:
    """Score models, with base and experts; write records, predictions, comparisons, notes and tables."""
    from orthomerge.evaluation.evaluate import Subject, score
    from orthomerge.runs.scoring import protocols_of

    section, encoded = work.section, work.encoded
    subjects = []
    if section.references and work.experts.has_base:
        base = work.experts.base.with_heads(work.experts.heads)
        subjects.append(Subject("base", dict.fromkeys(encoded.tasks, base)))
    if section.references:
        subjects.append(Subject("expert", encoded.teachers))
    subjects += [Subject.of(work.model(key), encoded.tasks) for key in models]
    protocols = protocols_of(section, work.recipe.method)
    scores = score(subjects, protocols, encoded, against=section.against, margin=section.margin / 100)
    scores.write(place)


def make_diagnosis(place: Path, work: Work, *, merged: str, records: str, where: str) -> None:
    """Diagnose the merge. `where`: its folder, for the commands that the verdict suggests."""
    from orthomerge.analysis.commands import suggested_commands
    from orthomerge.analysis.diagnose import diagnose
    from orthomerge.analysis.diagnosis import FILE, write_diagnosis
    from orthomerge.evaluation.records import read_records
    from orthomerge.evaluation.scale import search_scale
    from orthomerge.runs.scoring import detail_of, diagnose_of

    recipe, section, encoded, search = work.recipe, work.section, work.encoded, None
    if diagnose_of(recipe).scales:
        search = search_scale(
            work.experts,
            "task_arithmetic",
            section.data,
            grid=_GRID,
            criterion="accuracy",
            seed=recipe.seed,
            encoding=encoded.how,
            progress=work.progress,
        )
    sources, detail = section.data, detail_of(recipe)
    in_files = all(isinstance(source, str) for source in sources.values())
    diagnosis = diagnose(
        work.model(merged),
        work.experts,
        encoded.tasks,
        detail=detail,
        records=read_records(work.folder(records) / RECORDS),
        search=search,
        commands=suggested_commands(where, sources, work.experts, aligner=detail.aligner) if in_files else {},
        how=encoded.how,
        progress=work.progress,
    )
    write_diagnosis(place / FILE, diagnosis)


def make_page(place: Path, work: Work) -> None:
    """Write the page over the run folder, if anything was scored."""
    from orthomerge.report.report import report

    if (work.run / RECORDS).stat().st_size:
        report(work.run, place / PAGE, title=work.title, say=lambda text: work.progress.stage(text, None))
