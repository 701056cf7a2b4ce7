"""Score models: subjects x tasks x protocols x draws of support inputs, one record each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evidence import answers, draws, extra_numbers
from orthomerge.evaluation.joint import joint_features, joint_labels, joint_predictions
from orthomerge.evaluation.metrics import UNSCORED, counted
from orthomerge.evaluation.protocol import EvaluationProtocol
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.subject import Subject
from orthomerge.models.heads import head_of
from orthomerge.models.kinds import head_kind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Scored:
    """A record with the predictions [n] that it was counted from, and the truth [n] in the same label space."""

    record: Record
    predicted: torch.Tensor
    truth: torch.Tensor


def evaluate(
    subjects: Sequence[Subject],
    protocols: Sequence[EvaluationProtocol],
    encoded: EncodedTasks,
    *,
    suite: str | None = None,
) -> Iterator[Scored]:
    """Score subject by subject and task by task; nothing is written."""
    _check_subjects(encoded, subjects)
    _check_protocols(subjects, protocols)
    _check_draws(encoded, subjects, protocols)
    for subject in subjects:
        encoded.keep(list(subject.models.values()))
        chosen = [protocol for protocol in protocols if protocol.scores(subject.name)]
        # All that will be read, so that a merge is computed once and before any expert is loaded.
        splits = dict.fromkeys(("test", *(protocol.split for protocol in chosen if protocol.needs)))
        for task, model in subject.models.items():
            for split in splits:
                encoded.features(model, task, split)
        for task, model in subject.models.items():
            truth = encoded.labels(task, "test")
            for protocol in chosen:
                for answer in answers(protocol, encoded, model, task):
                    record = protocol.annotate(_record(subject, task, answer.predicted, truth, suite))
                    record = replace(record, seed=answer.seed, extra_parameters=answer.extra)
                    yield Scored(record, answer.predicted, truth)
        if len(subject.models) > 1 and len({model.digest for model in subject.models.values()}) == 1:
            yield from _joint(encoded, subject, suite)


def _check_subjects(encoded: EncodedTasks, subjects: Sequence[Subject]) -> None:
    """Rows of tables and files of predictions are told apart by the subject's name."""
    for name, count in Counter(subject.name for subject in subjects).items():
        if count > 1:
            raise RecipeError(f"{count} models are called {name!r}; give each a name of its own")
    for subject in subjects:
        for task in subject.models:
            if task not in encoded.tasks:
                raise RecipeError(
                    f"{subject.name!r} has task {task!r}, but there is no data of it; {nearest(task, encoded.tasks)}"
                )
            encoded.labels(task, "test")


def _check_protocols(subjects: Sequence[Subject], protocols: Sequence[EvaluationProtocol]) -> None:
    """No two answers may look the same."""
    blank = Record("", "", "", "", 0, 0, 0, 0, "data-free")
    for one, other in combinations(protocols, 2):
        shared = [subject.name for subject in subjects if one.scores(subject.name) and other.scores(subject.name)]
        if shared and one.annotate(blank) == other.annotate(blank):
            raise RecipeError(
                f"two protocols score {shared[0]!r} in the same way: {one.annotate(blank).way.title} "
                f"({one.annotate(blank).access}); name it once, or give them other options, shots or support"
            )


def _check_draws(encoded: EncodedTasks, subjects: Sequence[Subject], protocols: Sequence[EvaluationProtocol]) -> None:
    """Whether there are enough support inputs, before anything is encoded."""
    for protocol in protocols:
        tasks = {task for subject in subjects if protocol.scores(subject.name) for task in subject.models}
        for task in encoded.tasks:
            if task in tasks:
                next(draws(protocol, encoded.tasks[task]))


def _joint(encoded: EncodedTasks, subject: Subject, suite: str | None) -> Iterator[Scored]:
    """All labels in one space, the task unknown: is the merged model a general one?"""
    # In the order of the data, which makes the joint label space the same for all subjects.
    models = {task: subject.models[task] for task in encoded.tasks if task in subject.models}
    heads = {task: encoded.classifier(model, task) for task, model in models.items()}
    features, readers = joint_features(encoded, models, heads)
    labels, extra = joint_labels(features, heads), sum(map(extra_numbers, heads.values()))
    for task, predicted in joint_predictions(features, readers).items():
        record = _record(subject, task, predicted, labels[task], suite)
        yield Scored(replace(record, protocol="joint", extra_parameters=extra), predicted, labels[task])


def _record(subject: Subject, task: str, predicted: torch.Tensor, truth: torch.Tensor, suite: str | None) -> Record:
    """A record that does not say yet how the model was scored."""
    model = subject.models[task]
    kind, kept = head_of(model.head(task)).kind, predicted != UNSCORED
    score = counted(predicted[kept], truth[kept], kind)
    return Record(
        task=task,
        method=subject.name,
        protocol="",
        metric=head_kind(kind).metric,
        **vars(score),
        access=subject.access,
        parameters=dict(subject.parameters),
        suite=suite,
        inputs={"model": model.digest},
    )
