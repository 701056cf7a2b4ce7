"""From arguments of `evaluate` and `diagnose` to questions, subjects and what they are measured with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from orthomerge.cli.commands import pair
from orthomerge.errors import RecipeError, nearest
from orthomerge.evaluation.subjects import output_subject
from orthomerge.recipe import parse_value

if TYPE_CHECKING:
    from orthomerge.evaluation.evaluate import Bench, Question, Subject
    from orthomerge.suites.suite import Suite

__all__ = [
    "check_against",
    "experts_or_nothing",
    "merges_of",
    "output_subject",
    "own_subjects",
    "questions_of",
    "suite_subjects",
]

_EXPERTS = "experts"  # in the run folder: the experts in the form in which everything is evaluated
_REFERENCES = ("base", "expert", "mtl")


@contextmanager
def experts_or_nothing(out: Path) -> Iterator[None]:
    """What fails takes the experts' folder in `out` away again if it was not there before."""
    folder = out / _EXPERTS
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        if folder in new:
            shutil.rmtree(folder, ignore_errors=True)
        for each in new[1:]:
            with suppress(OSError):
                each.rmdir()
        raise


def merges_of(suite: str, methods: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Methods with their options, all of which must exist."""
    from orthomerge.merging.methods import make_method
    from orthomerge.suites.table import find_suite

    tasks, found = find_suite(suite).tasks, []
    for text in methods:
        name, _, options = text.partition(":")
        parameters = parse_value(f"{{{options}}}") if options else {}
        make_method(name, parameters, tasks=tasks)
        found.append((name, parameters))
    return found


def check_against(against: str | None, merges: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """The name must be one that a subject will have."""
    from orthomerge.evaluation.evaluate import Subject
    from orthomerge.suites.suite import output_name

    merged = [Subject(name, {"": Path(output_name(name, parameters))}) for name, parameters in merges]
    known = [*_REFERENCES, *(subject.name for subject in _told_apart(merged))]
    if against is not None and against not in known:
        raise RecipeError(f"--against {against}: there is no such method here; {nearest(against, known)}")


def suite_subjects(
    suite: Suite, merges: Sequence[tuple[str, dict[str, Any]]], device: str, batch: int
) -> tuple[Bench, list[Subject]]:
    from orthomerge.evaluation.evaluate import Bench
    from orthomerge.features.cache import FeatureCache

    references = suite.references()
    bench = Bench(
        suite.tasks,
        suite.processor,
        teachers=references["expert"].models,
        cache=FeatureCache(suite.folder / "features"),
        device=device,
        batch=batch,
    )
    return bench, _told_apart([*references.values(), *(suite.merged(name, given) for name, given in merges)])


def own_subjects(
    models: list[str], data: list[str], experts: list[str], device: str, batch: int, out: Path
) -> tuple[Bench, list[Subject]]:
    """Output folders of `merge`, the user's data, and the experts as references and teachers."""
    from orthomerge.data.labels import match_labels
    from orthomerge.data.processing import load_processor
    from orthomerge.data.reading import read_task
    from orthomerge.evaluation.evaluate import Bench, Subject
    from orthomerge.manifest import read_manifest
    from orthomerge.pipeline import merge
    from orthomerge.recipe import Recipe

    if not models or not data:
        raise RecipeError("give a suite, or output folders of `orthomerge merge` and --data TASK=PATH for each task")
    folders = [Path(model) for model in models]
    tasks = {}
    for text in data:
        name, source = pair(text, "--data TASK=PATH")
        for folder in folders:
            if name not in (known := read_manifest(folder)["heads"]):
                raise RecipeError(f"{folder} has no task {name!r}; {nearest(name, known)}")
        labels = tuple(read_manifest(folders[0])["heads"][name]["labels"])
        tasks[name] = match_labels(replace(read_task(source), name=name), labels)
    modality = next(iter(tasks.values())).modality
    processor = load_processor(folders[0] / "encoder", modality=modality)
    given = dict(pair(text, "--expert TASK=PATH") for text in experts)
    for task in given:
        if task not in tasks:
            raise RecipeError(f"--expert {task}=... has no --data {task}=...; {nearest(task, tasks)}")
    teachers = {task: out / _EXPERTS / task for task in given}
    for task, path in given.items():
        # The average of one expert is that expert, in the form in which everything is evaluated.
        merge(Recipe(experts={task: path}, method="average"), out=teachers[task], force=True)
    bench = Bench(tasks, processor, teachers=teachers, device=device, batch=batch)
    subjects = [Subject("expert", teachers)] if teachers else []
    subjects += [output_subject(folder, tasks) for folder in folders]
    return bench, _told_apart(subjects)


def _told_apart(subjects: list[Subject]) -> list[Subject]:
    """Merges by the same method are called after their folders too."""
    names = [subject.name for subject in subjects]
    return [
        replace(subject, name=f"{subject.name} ({next(iter(subject.models.values())).name})")
        if names.count(subject.name) > 1
        else subject
        for subject in subjects
    ]


def questions_of(
    protocols: list[str], aligners: list[str], shots: list[str], seeds: int, access: list[str]
) -> list[Question]:
    from orthomerge.alignment.aligners import find_aligner
    from orthomerge.evaluation.evaluate import Question
    from orthomerge.evaluation.protocols import find_protocol
    from orthomerge.records import Access

    counts = [_shots(text) for text in shots]
    for kind in access:
        if kind not in get_args(Access) or kind == "data-free":
            raise RecipeError(f"unknown access {kind!r}; {nearest(kind, get_args(Access)[1:])}")
    readings = [(name, None) for name in protocols] + [("current", find_aligner(name).name) for name in aligners]
    questions = []
    for name, aligner in readings:
        if aligner is None and not find_protocol(name).needs:
            questions.append(Question(name))
            continue
        for count in counts:
            draws = seeds if count is not None else 1
            questions += [
                Question(name, shots=count, seeds=draws, access=cast(Access, kind), aligner=aligner) for kind in access
            ]
    return questions


def _shots(text: str) -> int | float | None:
    if text == "all":
        return None
    try:
        count = float(text) if "." in text else int(text)
    except ValueError:
        count = 0
    if count <= 0 or (count > 1 and isinstance(count, float)):
        raise RecipeError(f"--shots must be a whole number a class, a share below 1, or all, got {text!r}")
    return count
