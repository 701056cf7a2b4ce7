from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.core.schema import build
from orthomerge.data.reading import labelled_tasks, sources_of
from orthomerge.evaluation.comparisons import MARGIN
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Subject, references_of, score, with_unique_names
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.scores import Scores
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts, reopen_experts
from orthomerge.models.model import Model
from orthomerge.models.saved import resolve
from orthomerge.runs.recipe import parse_value
from orthomerge.runs.sections import Scoring, protocols_of

Reference = Literal["base", "expert"]
One = Model | Subject | str | Path
Named = One | Sequence[One] | Mapping[str, One]


def evaluate(
    models: Named,
    data: Mapping[str, Any] | str | Path,
    *,
    protocols: Sequence[str | EvaluationProtocol] = ("current",),
    experts: Experts | Mapping[str, Any] | None = None,
    base: Any = None,
    references: Sequence[Reference] = (),
    against: str | None = None,
    margin: float = MARGIN,
    suite: str | None = None,
    encoding: Encoding | None = None,
    progress: Progress = SILENT,
) -> Scores:
    """Score models on labelled test inputs, by task or in a folder, and compare them; nothing is written.

    `models`: one or several models or paths, by name if names matter. `protocols`: names of protocols and aligners, or
    `EvaluationProtocol` objects. `experts`: the opened experts of the models; else those of the first model are opened
    if needed, at their recorded paths or at those in `experts` and `base`. `references`: also score the base with the
    experts' heads, and the experts. `against`: the name to compare with, the best if None. `margin`: accuracies that
    differ by less may be called comparable (0.01 is a point). `suite`: a name for the records.
    """
    chosen = [EvaluationProtocol.of(protocol) for protocol in protocols]
    if not chosen:
        raise RecipeError("'protocols' is empty: name at least one, or leave it out")
    for protocol in chosen:
        protocol.builder()  # checks its options before any work
    subjects, first, folder, data = _subjects(models, data)
    labels = {task: model.head(task).labels for subject in reversed(subjects) for task, model in subject.models.items()}
    tasks = labelled_tasks(data, labels, first.family.modality)
    needs_all = any("expert" in protocol.needs for protocol in chosen)
    if not isinstance(experts, Experts) and (experts or needs_all or references):
        names = tuple(tasks) if needs_all or not experts else tuple(experts)
        experts = reopen_experts(first, folder=folder, base=base, experts=experts, tasks=names)
    teachers: dict[str, Model] = {}
    if isinstance(experts, Experts):
        teachers = {task: experts.teacher(task) for task in tasks if task in experts.tasks}
        named = references_of(experts, teachers)
        if "base" in references and "base" not in named:
            raise RecipeError("the experts were opened without a base, so it cannot be scored; leave out 'base'")
        subjects = [*(subject for name, subject in named.items() if name in references), *subjects]
    encoded = EncodedTasks(tasks, teachers, encoding or Encoding(), progress)
    return score(subjects, chosen, encoded, suite=suite, against=against, margin=margin)


def _subjects(
    models: Named, data: Mapping[str, Any] | str | Path
) -> tuple[list[Subject], Model, Path | None, Mapping[str, Any]]:
    """Return uniquely named subjects, the first model and its folder, and the source of each task."""
    if isinstance(models, Mapping):
        items = list(models.values())
    else:
        items = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    if not items:
        raise RecipeError("there is no model to score: give at least one")
    subjects, sources = list[Subject](), list[tuple[Model, Path | None]]()
    for item in items:
        if isinstance(item, Subject):
            subjects.append(item)
            sources.append((next(iter(item.models.values())), None))
        else:
            model, folder = resolve(item)
            data = sources_of(data, model.tasks)
            for task in data:
                model.head(task)  # raises if the model does not have the task
            subjects.append(Subject.of(model, data))
            sources.append((model, folder))
    if isinstance(models, Mapping):
        subjects = [replace(subject, name=name) for name, subject in zip(models, subjects, strict=True)]
    else:
        subjects = with_unique_names(subjects, [folder.name if folder else "" for _, folder in sources])
    return subjects, *sources[0], sources_of(data, sources[0][0].tasks)


def read_protocols(
    names: Sequence[str], aligners: Sequence[str], *, shots: Sequence[str], seeds: int, access: Sequence[str]
) -> list[EvaluationProtocol]:
    """Return every combination of the protocols, aligners, shots and accesses of a command line."""
    options = {"shots": [parse_value(text) for text in shots], "seeds": seeds, "access": list(access)}
    scorings = [{"protocol": name} for name in names] + [{"aligner": name} for name in aligners]
    return protocols_of([build(Scoring, {**item, **options}, where="--protocol") for item in scorings], "train")
