"""Evidence holds what the access allows and the protocol declares; joint predictions need task and class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.analysis.making import COUNTS, Toy
from tests.evaluation.making import CURRENT, average, encoded, only, scored

from orthomerge.alignment.aligners import make_aligner
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Split, Task, few_shot
from orthomerge.evaluation.answers import answers, gather, joint_answers
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Subject, evaluate
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.protocols import Builder, EvaluationProtocol, Evidence, Need
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Classifier, Head, Linear, head_of
from orthomerge.models.model import Model


@dataclass(frozen=True)
class Spy:
    """Keeps the evidence that it gets."""

    needs: frozenset[Need]
    evidence: list[Evidence] = field(default_factory=list)

    def build(self, evidence: Evidence) -> Classifier:
        self.evidence.append(evidence)
        return evidence.head


@dataclass(frozen=True)
class Spied(EvaluationProtocol):
    """A protocol whose builder is a spy."""

    spy: Any = None

    @property
    def needs(self) -> frozenset[Need]:
        needs: frozenset[Need] = self.spy.needs
        return needs

    def builder(self) -> Builder:
        builder: Builder = self.spy
        return builder


ACCESS: dict[str, Split] = {"inductive": "train", "transductive": "test"}
NEEDS: list[frozenset[Need]] = [
    frozenset(),
    frozenset({"features"}),
    frozenset({"features", "labels"}),
    frozenset({"features", "expert"}),
    frozenset({"features", "expert", "labels"}),
]


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("shots", [None, 0.5, 2])
@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "+".join(sorted(needs)) or "nothing")
def test_evidence_is_what_was_declared(toy: Toy, needs: frozenset[Need], access: Any, shots: float | None) -> None:
    tasks, model, task = encoded(toy), average(toy).models["where"], "where"
    own = model.with_heads({**model.heads, task: replace(head_of(model.head(task)), normalise=True)})
    protocol = Spied(shots=shots, seeds=2, access=access, spy=Spy(needs))
    if "labels" in needs and (access, shots) == ("transductive", None):
        with pytest.raises(RecipeError, match=r"needs labels cannot be scored .* of 37 inputs 0 would remain"):
            list(answers(protocol, tasks, own, task))
        return
    results = list(answers(protocol, tasks, own, task))
    assert [answer.seed for answer in results] == ([0, 1] if needs else [0])
    split, teacher = ACCESS[access], tasks.teacher(task)
    whole, labels = tasks.features(own, task, split), toy.tasks[task][split].labels
    assert labels is not None
    place = {tuple(row): number for number, row in enumerate(whole.values.tolist())}
    assert len(place) == COUNTS[split]
    for answer, evidence in zip(results, protocol.spy.evidence, strict=True):
        assert len(answer.predicted) == COUNTS["test"]
        assert evidence.seed == answer.seed
        # The head is the model's, or the expert's if the expert is needed.
        assert evidence.head is (teacher if "expert" in needs else own).head(task)
        if not needs:
            assert evidence.support is evidence.expert is None
            continue
        assert evidence.support is not None
        rows = [place[tuple(row)] for row in evidence.support.values.tolist()]
        few = few_shot(labels, 2, seed=answer.seed).tolist() if shots == 2 else None
        assert len(set(rows)) == len(rows) == {None: len(whole), 0.5: round(len(whole) / 2), 2: 6}[shots]
        assert few is None or sorted(rows) == sorted(few)
        if "labels" in needs:
            assert evidence.support.labels is not None
            assert evidence.support.labels.tolist() == labels[rows].tolist()
        else:
            assert evidence.support.labels is None
        if "expert" in needs:
            assert evidence.expert is not None
            assert evidence.expert.labels is None
            assert evidence.expert.values.equal(tasks.features(teacher, task, split).values[rows])
        else:
            assert evidence.expert is None
        # What was shown with its label is not scored, and all else is.
        shown = sorted(rows) if "labels" in needs and access == "transductive" else []
        assert (answer.predicted == UNSCORED).nonzero().flatten().tolist() == shown


def seeded(name: str, options: dict[str, Any], seed: int) -> Any:
    aligner: Any = make_aligner(name, options)
    return replace(aligner, seed=seed) if "seed" in {each.name for each in fields(aligner)} else aligner


def by_hand(
    protocol: EvaluationProtocol, tasks: EncodedTasks, model: Model, task: str, split: Split
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Predictions of three shots without `gather`, and the support; by draw."""
    expert, labels = tasks.teacher(task), tasks.tasks[task][split].labels
    assert labels is not None
    for seed in range(protocol.seeds):
        rows = torch.as_tensor(few_shot(labels, 3, seed=seed))
        merged, own = (tasks.features(each, task, split).take(rows) for each in (model, expert))
        name, head = protocol.aligner or protocol.name, head_of(expert.head(task))
        if name in ("current", "knn", "probe"):
            evidence = Evidence(head_of(model.head(task)), merged, seed=seed)
            classifier = EvaluationProtocol(name, protocol.options).builder().build(evidence)
        else:
            pair = FeaturePair(merged.unlabelled(), own.unlabelled())
            classifier = seeded(name, dict(protocol.options), seed).fit(pair, head).classifier
        yield classifier(tasks.features(model, task, "test").values).argmax(1), rows


CASES = [
    EvaluationProtocol("current"),
    EvaluationProtocol("knn"),
    EvaluationProtocol("probe", {"steps": 5}),
    EvaluationProtocol("aligned-c", {"epochs": 1, "batch": 4, "lr": 0.05}),
    EvaluationProtocol(aligner="aligned-c", options={"epochs": 1, "batch": 4, "lr": 0.05}),
    EvaluationProtocol(aligner="ridge"),
    EvaluationProtocol(aligner="orthogonal", options={"kappa": 0.1}),
    EvaluationProtocol(aligner="auto"),
    EvaluationProtocol(aligner="surgery", options={"steps": 20, "rank": 4}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"aligner-{case.aligner}" if case.aligner else case.name)
@pytest.mark.parametrize("access", ACCESS)
def test_contract(toy: Toy, case: EvaluationProtocol, access: Any) -> None:
    """A draw gives what fitting by hand gives, whatever else there is, and a record says how it was scored."""
    protocol, split = replace(case, shots=3, seeds=2, access=access), ACCESS[access]
    subject = average(toy)
    for task, model in subject.models.items():
        results = list(answers(protocol, encoded(toy), model, task))
        assert [answer.seed for answer in results] == ([0, 1] if protocol.needs else [0])
        for answer, (predicted, rows) in zip(
            results, by_hand(protocol, encoded(toy), model, task, split), strict=False
        ):
            if access == "transductive" and "labels" in protocol.needs:
                predicted[rows] = UNSCORED
            assert answer.predicted.equal(predicted)
            assert (answer.extra > 0) == (protocol.aligner == "surgery" or protocol.name == "knn")
        # Inputs of the other splits make no difference, nor do other draws.
        used = {name: part for name, part in toy.tasks[task].splits.items() if name in (split, "test")}
        alone = encoded(toy, tasks={task: replace(toy.tasks[task], splits=used)})
        (later,) = answers(replace(protocol, first=1, seeds=1), alone, model, task)
        assert later.predicted.equal(results[-1].predicted)
    for item in scored(toy, [subject], [protocol])[: 2 if protocol.needs else 1]:
        record = item.record
        assert (record.protocol, record.aligner, record.options) == (case.name, case.aligner, case.options)
        expected = (3, split, access) if protocol.needs else (None, None, "data-free")
        assert (record.shots, record.support, record.access) == expected


def test_a_model_that_is_more_than_a_head_is_scored_as_it_is(toy: Toy) -> None:
    """Only what needs evidence sees the head behind it."""
    from orthomerge.models.heads import SurgeryHead

    model, tasks = average(toy).models["where"], encoded(toy)
    head = head_of(model.head("where"))
    extra = SurgeryHead(head, torch.zeros(4, head.width), torch.zeros(head.width, 4))
    more = model.with_heads({**model.heads, "where": extra})
    whole, behind = (gather(EvaluationProtocol(name), tasks, more, "where") for name in ("current", "knn"))
    assert id(whole.head) == id(extra)
    assert behind.head is head
    (answer,) = answers(EvaluationProtocol(), tasks, more, "where")
    assert answer.extra == 8 * head.width


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "knn", "seeds": 0}, "'seeds' must be at least 1, got 0"),
        ({"name": "knn", "first": -1}, "'first' must be at least 0, got -1"),
        ({"name": "knn", "support": "test"}, "must come from another split than the scored one, got 'test' for both"),
        ({"name": "knn", "aligner": "ridge"}, "protocol must be 'current' with aligner 'ridge', got 'knn'"),
        ({"name": "curent"}, r"unknown protocol 'curent'; did you mean 'current'\?"),
        ({"aligner": "rigde"}, "unknown aligner 'rigde'; did you mean 'ridge'"),
        ({"name": "aligned-c", "options": {"epoch": 3}}, "protocol aligned-c: unknown option 'epoch'; did you mean"),
        ({"name": "current", "options": {"k": 3}}, "protocol current: unknown option 'k'"),
        ({"name": "aligned-c", "options": {"seed": 3}}, "protocol aligned-c: the seed is that of the draw"),
        ({"aligner": "aligned-c", "options": {"seed": 3}}, "aligner aligned-c: the seed is that of the draw"),
        ({"aligner": "ridge", "options": {"seed": 3}}, "aligner ridge: unknown option 'seed'"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        EvaluationProtocol(**options).builder()
    if options.keys() == {"name"}:
        with pytest.raises(RecipeError, match=message):
            EvaluationProtocol.of(options["name"])


ONE = Head(Linear(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), ("left", "right"))
TWO = Head(Linear(torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, -3.0]])), ("up", "level", "down"))
HEADS = {"one": ONE, "two": TWO}


class Given(EncodedTasks):
    """Features that no encoder had to compute, and heads of no model."""

    def features(self, model: Any, task: str, split: Any, *, reader: Head | None = None) -> Features:
        return Features(torch.tensor(self.tasks[task][split].inputs), task, split)

    def classifier(self, model: Any, task: str) -> Head:
        return HEADS[task]


def features(name: str, inputs: list[list[float]], labels: list[int]) -> Task:
    test = Examples(inputs, np.array(labels, dtype=np.int64), "test")
    return Task(name, HEADS[name].labels, "text", {"test": test})


def test_joint_by_hand() -> None:
    # Logits of `one`, then of `two`:
    #   (5, 1):    5 -5 |  3  0 -3   -> place 0 = left
    #   (-2, 1):  -2  2 |  3  0 -3   -> place 2 = up: right within `one`, but the wrong task
    #   (1, -2):   1 -1 | -6  0  6   -> place 4 = down
    #   (0.5, 0): .5 -.5|  0  0  0   -> place 0 = left: the wrong task for `two`
    one, two = features("one", [[5.0, 1.0], [-2.0, 1.0]], [0, 1]), features("two", [[1.0, -2.0], [0.5, 0.0]], [2, 1])
    tasks, models = Given({"one": one, "two": two}), dict.fromkeys(HEADS)
    found = joint_answers(tasks, models)  # type: ignore[arg-type]
    assert {task: (answer.predicted.tolist(), answer.truth.tolist()) for task, answer in found} == {
        "one": ([0, 2], [0, 1]),
        "two": ([4, 0], [4, 3]),
    }


def test_joint_goes_by_content_and_not_by_object(toy: Toy) -> None:
    """Multi-task training gives one encoder in a model per task."""
    models = {task: average(toy).models[task] for task in reversed(toy.tasks)}
    assert models["where"].encoder is not models["bright"].encoder
    mtl = Subject("mtl", {task: model.with_heads({task: model.head(task)}) for task, model in models.items()})
    scores = scored(toy, [mtl, average(toy)])
    for task in toy.tasks:
        (item,) = only(scores, method="mtl", protocol="joint", task=task)
        (same,) = only(scores, method="average", protocol="joint", task=task)
        assert (
            item.predictions.predicted == same.predictions.predicted
        ).all()  # in one label space, whatever the order of the tasks
        assert (item.predictions.truth == same.predictions.truth).all()


def test_joint_with_heads_that_read_the_encoder_in_different_ways(toy: Toy) -> None:
    """Every head reads every input in its own way."""
    model = average(toy).models["where"]
    heads = {"bright": replace(head_of(model.heads["bright"]), pooling="mean"), "where": model.heads["where"]}
    mixed, tasks = model.with_heads(heads), encoded(toy)
    joint = only(list(evaluate([Subject.of(mixed, toy.tasks)], [CURRENT], tasks)), protocol="joint")
    for item in joint:
        task = item.record.task
        parts = [head(tasks.features(mixed, task, "test", reader=head_of(head)).values) for head in heads.values()]
        assert item.predictions.predicted.tolist() == torch.cat(parts, 1).argmax(1).tolist()
    (plain,) = only(scored(toy, [average(toy)]), protocol="joint", task="bright")
    (other,) = only(joint, task="bright")
    assert (plain.predictions.predicted != other.predictions.predicted).any()
