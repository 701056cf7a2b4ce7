"""Score models: one record per subject, task, protocol and draw of support inputs; and warnings about the scores.

A protocol that needs labels is never scored on an input whose label it was given. Fits are small and run with one
thread, so that a result does not depend on the number of threads.

In the joint label space (KnOTS, Stoica et al. 2024, arXiv 2410.19735) the task of an input is unknown: the logits of
all tasks' classifiers are concatenated, [n, C_1 + ... + C_T], and a prediction counts only if task and class are
right. Differs from the paper: the same label in two tasks ("seven" in MNIST and SVHN) counts as two classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any, cast

import numpy as np
import torch

from orthomerge.core.checks import positive
from orthomerge.core.device import fixed_threads
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.version import VERSION
from orthomerge.data.task import Access, Split, Task, few_shot, share
from orthomerge.evaluation.comparisons import MARGIN, Predictions, compare_records
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import UNSCORED, counted, predict
from orthomerge.evaluation.protocols import EvaluationProtocol, Evidence
from orthomerge.evaluation.records import Record, Way
from orthomerge.evaluation.scores import Scores, prediction_name
from orthomerge.models.experts import Experts
from orthomerge.models.heads import Classifier, Head, head_kind, head_of, logits_of
from orthomerge.models.manifest import short_hashes
from orthomerge.models.model import Model

_MANY_SHARED = 0.01  # share of the test inputs; public datasets have a few in a thousand
_SUSPICIOUS = 0.05  # gap between accuracy on test and on validation data
_Rows = torch.Tensor | None  # of the support inputs; None for all
_COMPARED: tuple[Split, ...] = ("test", "val")


@dataclass(frozen=True, eq=False)
class Subject:
    """One model for all tasks, or one per task, scored under one name. `parameters`: options of the merging method.
    `access`: of the inputs that the models were made with.
    """

    name: str
    models: Mapping[str, Model]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    access: Access = "data-free"

    @classmethod
    def of(cls, model: Model, tasks: Iterable[str]) -> Subject:
        """Return a subject named after the model's method, and its aligner if the heads were aligned."""
        parameters = model.origin.facts["method"]["parameters"]
        return cls(model.title, dict.fromkeys(tasks, model), parameters, access=model.origin.access)


def references_of(experts: Experts, tasks: Iterable[str]) -> dict[str, Subject]:
    """Return references for tables by name: the base with the experts' heads, if there is a base, and the experts."""
    models = {"expert": {task: experts.teacher(task) for task in tasks}}
    if experts.has_base:
        models = {"base": dict.fromkeys(models["expert"], experts.base.with_heads(experts.heads)), **models}
    return {name: Subject(name, own) for name, own in models.items()}


def with_unique_names(subjects: Sequence[Subject], folders: Sequence[str] = ()) -> list[Subject]:
    """Append the folder, or else the options of the method, to names that occur more than once."""
    names, renamed = [subject.name for subject in subjects], []
    for subject, folder in zip(subjects, folders or [""] * len(subjects), strict=True):
        options = (f"-{key}={value}" for key, value in sorted(subject.parameters.items()) if value is not None)
        label = folder or "".join([subject.name, *options]).replace("/", "_")
        unique = names.count(subject.name) == 1
        renamed.append(subject if unique else replace(subject, name=f"{subject.name} ({label})"))
    return renamed


@dataclass(frozen=True, eq=False)
class Scored:
    record: Record
    predictions: Predictions


def score(
    subjects: Sequence[Subject],
    protocols: Sequence[EvaluationProtocol],
    encoded: EncodedTasks,
    *,
    suite: str | None = None,
    against: str | None = None,
    margin: float = MARGIN,
) -> Scores:
    """Score all subjects, compare them with `against` or the best, and collect warnings."""
    names = [subject.name for subject in subjects]
    if against is not None and against not in names:
        raise RecipeError(f"there is no model {against!r} to compare with; {nearest(against, names)}")
    positive(margin=margin)
    scored = list(evaluate(subjects, protocols, encoded, suite=suite))
    records = [item.record for item in scored]
    predictions = {str(item.record.predictions): item.predictions for item in scored}
    comparisons = compare_records(records, predictions, against=against, margin=margin)
    return Scores(records, comparisons, contamination_notes(encoded), predictions)


def evaluate(
    subjects: Sequence[Subject],
    protocols: Sequence[EvaluationProtocol],
    encoded: EncodedTasks,
    *,
    suite: str | None = None,
) -> Iterator[Scored]:
    """Yield one score per subject, task, protocol and draw of support inputs; nothing is written."""
    _check(subjects, protocols, encoded)
    for subject in subjects:
        encoded.keep(list(subject.models.values()))
        own_protocols = [protocol for protocol in protocols if protocol.scores(subject.name)]
        # All splits first, so that a merge is computed once, before any expert is loaded.
        splits = dict.fromkeys(("test", *(protocol.split for protocol in own_protocols if protocol.needs)))
        for task, model in subject.models.items():
            for split in splits:
                encoded.features(model, task, split)
        for (task, model), protocol in product(subject.models.items(), own_protocols):
            for answer in answers(protocol, encoded, model, task):
                yield _scored(subject, task, protocol.way(subject.access), protocol.options, answer, suite)
        if len(subject.models) > 1 and len({model.digest for model in subject.models.values()}) == 1:
            # Tasks in the order of the data, so that the joint label space is the same for all subjects.
            models = {task: subject.models[task] for task in encoded.tasks if task in subject.models}
            way = Way("joint", (), None, subject.access, None, None)
            for task, answer in joint_answers(encoded, models):
                yield _scored(subject, task, way, {}, answer, suite)


def _check(subjects: Sequence[Subject], protocols: Sequence[EvaluationProtocol], encoded: EncodedTasks) -> None:
    """Refuse what cannot be scored: equal names, missing data or labels, equal protocols, too few support inputs."""
    for name, count in Counter(subject.name for subject in subjects).items():
        if count > 1:
            raise RecipeError(f"{count} models are called {name!r}; give each a name of its own")
    for subject in subjects:
        for task in subject.models:
            encoded.labels(task, "test")  # refuses a missing task or label
    for one, other in combinations(protocols, 2):
        way = one.way("data-free")
        shared = [subject.name for subject in subjects if one.scores(subject.name) and other.scores(subject.name)]
        if shared and way == other.way("data-free"):
            raise RecipeError(
                f"two protocols score {shared[0]!r} in the same way: {way.title} ({way.access}); list it once, or "
                "give them different options, shots or support"
            )
    for protocol, subject in product(protocols, subjects):
        for task in subject.models if protocol.scores(subject.name) else ():
            next(draws(protocol, encoded.tasks[task]))


def _scored(
    subject: Subject, task: str, way: Way, options: Mapping[str, Any], answer: Answer, suite: str | None
) -> Scored:
    model = subject.models[task]
    kind, scored = head_of(model.head(task)).kind, answer.predicted != UNSCORED
    score = counted(answer.predicted[scored], answer.truth[scored], kind)
    predictions = Predictions(*(part.numpy().astype(np.int32) for part in (answer.predicted, answer.truth)))
    record = Record(
        task=task,
        method=subject.name,
        metric=head_kind(kind).metric,
        **vars(score),
        **{**vars(way), "options": dict(options)},
        seed=answer.seed,
        parameters=dict(subject.parameters),
        extra_parameters=answer.extra,
        suite=suite,
        versions={"orthomerge": VERSION, "torch": torch.__version__},
        inputs={"model": model.digest},
    )
    return Scored(replace(record, predictions=prediction_name(record, predictions)), predictions)


@dataclass(frozen=True)
class Answer:
    """Predicted and true classes [n] of the test inputs for one seed; `extra`: number of extra parameters."""

    seed: int
    predicted: torch.Tensor
    truth: torch.Tensor
    extra: int


def answers(protocol: EvaluationProtocol, encoded: EncodedTasks, model: Model, task: str) -> Iterator[Answer]:
    """Yield one answer per draw of support inputs, or a single one if the protocol needs none."""
    builder, test = protocol.builder(), encoded.features(model, task, "test")
    kind = head_of(encoded.classifier(model, task)).kind
    uses_test_labels = "labels" in protocol.needs and protocol.access == "transductive"
    for seed, rows in draws(protocol, encoded.tasks[task]):
        if uses_test_labels and (rows is None or len(rows) >= len(test)):
            raise RecipeError(
                "a protocol that needs labels cannot be scored on the inputs whose labels it was given: of "
                f"{len(test)} inputs 0 would remain; use fewer shots"
            )
        evidence = gather(protocol, encoded, model, task, seed, rows)
        with fixed_threads(1):
            classifier = builder.build(evidence)
            predicted = predict(classifier, test.values, kind)
        if uses_test_labels:
            predicted[rows] = UNSCORED
        yield Answer(seed, predicted, encoded.labels(task, "test"), extra_numbers(classifier))


def draws(protocol: EvaluationProtocol, task: Task) -> Iterator[tuple[int, _Rows]]:
    """Yield seed and support rows (None: all) per draw; one draw without support. Shots are per class."""
    if not protocol.needs:
        yield protocol.first, None
        return
    shots, examples = protocol.shots, task[protocol.split]
    for seed in range(protocol.first, protocol.first + protocol.seeds):
        if shots is None:
            yield seed, None
            continue
        if shots < 1:
            rows = share(len(examples), shots, seed=seed)
        elif examples.labels is None:
            raise RecipeError(f"{shots} shots per class need labelled inputs; give labels, a share below 1, or all")
        else:
            rows = few_shot(examples.labels, int(shots), seed=seed, allow_fewer=protocol.fewer)
        yield seed, torch.from_numpy(np.asarray(rows, dtype=np.int64))


def gather(
    protocol: EvaluationProtocol, encoded: EncodedTasks, model: Model, task: str, seed: int = 0, rows: _Rows = None
) -> Evidence:
    """Gather the evidence of one draw: only what the protocol declares in `needs`."""
    needs, classifier = protocol.needs, encoded.classifier(model, task)
    if not needs:
        return Evidence(cast("Head", classifier), seed=seed)  # unchanged: it may have extra parameters
    head, support, expert = head_of(classifier), encoded.features(model, task, protocol.split), None
    if "expert" in needs:
        teacher = encoded.teacher(task)
        head = head_of(encoded.classifier(teacher, task))
        expert = encoded.features(teacher, task, protocol.split).unlabelled()
    if "labels" not in needs:
        support = support.unlabelled()
    if rows is not None:
        support, expert = support.take(rows), None if expert is None else expert.take(rows)
    return Evidence(head, support, expert, seed)


def extra_numbers(classifier: Classifier) -> int:
    """Count the extra parameters of a classifier: the anchors of `knn`, the module of `surgery`."""
    if isinstance(classifier, Head):
        return 0
    values = classifier.extra_tensors() if hasattr(classifier, "extra_tensors") else vars(classifier)
    return sum(value.numel() for value in values.values() if isinstance(value, torch.Tensor))


def joint_answers(encoded: EncodedTasks, models: Mapping[str, Model]) -> Iterator[tuple[str, Answer]]:
    """Yield one answer per task, in the joint label space of `models`."""
    classifiers = {task: encoded.classifier(model, task) for task, model in models.items()}
    extra, start = sum(map(extra_numbers, classifiers.values())), 0
    for task, model in models.items():
        head = head_of(classifiers[task])
        logits = [
            logits_of(classifier, encoded.features(model, task, "test", reader=head_of(classifier)).values).float()
            for classifier in classifiers.values()
        ]
        predicted = head_kind(head.kind).choices(torch.cat(logits, 1)).cpu()
        yield task, Answer(0, predicted, encoded.labels(task, "test") + start, extra)
        start += len(head.labels)


def contamination_notes(encoded: EncodedTasks) -> list[str]:
    """Warn about test inputs that are also training inputs, and experts that are much better on test than on val."""
    notes = [note for task in encoded.tasks.values() for note in _shared_inputs_notes(task)]
    for task, expert in encoded.teachers.items():
        encoded.keep([expert])
        splits = encoded.tasks[task].splits if task in encoded.tasks else {}
        compared = [splits[split] for split in _COMPARED if split in splits]
        if len(compared) < 2 or any(part.labels is None or not len(part) for part in compared):
            continue
        test, val = (encoded.score(expert, task, split).value for split in _COMPARED)
        if test - val > _SUSPICIOUS:
            notes.append(
                f"the expert of {task!r} scores {100 * test:.1f} on test but {100 * val:.1f} on validation data, "
                f"{100 * (test - val):.1f} points less (more than {100 * _SUSPICIOUS:g}): it may have been trained on "
                "the test inputs"
            )
    return notes


def _shared_inputs_notes(task: Task) -> Iterator[str]:
    """Warn if many test inputs are also inputs for training or validation; files on disk are not compared."""
    parts = task.splits.values()
    if "test" not in task.splits or not all(isinstance(part.inputs, list | tuple) for part in parts):
        return
    test = short_hashes(task["test"])
    fitted = {content for part in parts if part is not task["test"] for content in short_hashes(part)}
    count = sum(content in fitted for content in test)
    if count and count >= _MANY_SHARED * len(test):
        yield (
            f"{count} of {len(test)} test inputs of {task.name!r} are among those for training or validation: "
            "models may have been fitted to them; take them out of one split"
        )
