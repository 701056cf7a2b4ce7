"""Scoring a merge with aligned heads: a protocol gives what fitting by hand gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.analysis.making import Toy
from tests.evaluation.making import CURRENT, average, encoded, experts, only, scored

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.aligner import Aligner
from orthomerge.alignment.auto import Auto
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.alignment.rigid import Orthogonal
from orthomerge.alignment.surgery import Surgery
from orthomerge.core.errors import RecipeError
from orthomerge.data.sampling import few_shot
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import evaluate
from orthomerge.evaluation.evidence import Evidence
from orthomerge.evaluation.protocol import EvaluationProtocol
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Classifier, Head, Linear, head_of
from orthomerge.models.model import Model


def aligner(name: str, **more: Any) -> EvaluationProtocol:
    return EvaluationProtocol(aligner=name, **more)


def by_hand(tasks: EncodedTasks, model: Model, task: str, split: Any, rows: Any = None) -> tuple[FeaturePair, Head]:
    """Unlabelled features of some inputs under a model and under the task's expert, and the expert's head."""
    expert = tasks.teacher(task)
    rows = torch.arange(len(tasks.tasks[task][split])) if rows is None else torch.as_tensor(rows)
    both = (tasks.features(each, task, split).take(rows).unlabelled() for each in (model, expert))
    return FeaturePair(*both), head_of(expert.head(task))


def says(classifier: Classifier, tasks: EncodedTasks, model: Model, task: str) -> torch.Tensor:
    return classifier(tasks.features(model, task, "test").values).argmax(1)


@pytest.mark.parametrize(
    ("name", "options", "fitted"),
    [
        ("ridge", {}, Ridge()),
        ("orthogonal", {"kappa": 0.1}, Orthogonal(kappa=0.1)),
        ("auto", {}, Auto()),
        ("surgery", {"steps": 20, "rank": 4}, Surgery(steps=20, rank=4)),
    ],
)
def test_an_aligner_is_fitted_as_by_hand(toy: Toy, name: str, options: dict[str, Any], fitted: Aligner) -> None:
    protocols = [
        aligner(name, options=options, shots=4, seeds=2),
        aligner(name, access="transductive", options=options),
    ]
    subject, tasks = average(toy), encoded(toy)
    scores, model = list(evaluate([subject], protocols, tasks)), subject.models["where"]
    for task in toy.tasks:
        labels = toy.tasks[task]["train"].labels
        assert labels is not None
        for seed in range(2):
            pair, head = by_hand(tasks, model, task, "train", few_shot(labels, 4, seed=seed))
            fit = replace(fitted, seed=seed) if isinstance(fitted, Surgery) else fitted
            (item,) = only(scores, task=task, access="inductive", seed=seed)
            assert item.predicted.equal(says(fit.fit(pair, head).classifier, tasks, model, task))
            record = item.record
            assert (record.protocol, record.aligner, record.options) == ("current", name, options)
            assert (record.shots, record.support) == (4, "train")
            assert (record.extra_parameters > 0) == (name == "surgery")
        (item,) = only(scores, task=task, access="transductive")
        classifier = fitted.fit(*by_hand(tasks, model, task, "test")).classifier
        assert item.predicted.equal(says(classifier, tasks, model, task))
        assert item.record.support == "test"


def test_the_expert_s_head_is_what_is_aligned(toy: Toy) -> None:
    """An expert with an aligned head is itself, and aligning a merge wins back what it lost."""
    scores = scored(toy, [experts(toy), average(toy)], [CURRENT, aligner("ridge"), aligner("auto")])
    for task in toy.tasks:
        current, ridge, auto = only(scores, method="expert", task=task)
        assert ridge.predicted.equal(current.predicted)
        assert auto.predicted.equal(current.predicted)
    unaligned, aligned = (
        np.mean([item.record.value for item in only(scores, method="average", protocol="current", aligner=name)])
        for name in (None, "ridge")
    )
    assert aligned > unaligned + 0.1


def test_a_model_whose_heads_were_changed_starts_from_the_expert_s_head(toy: Toy) -> None:
    model = average(toy).models["where"]
    spoilt = model.with_heads({task: replace(head_of(head), normalise=True) for task, head in model.heads.items()})
    protocol = aligner("ridge")
    one, other = (scored(toy, [replace(average(toy), models=dict.fromkeys(toy.tasks, each))], [protocol])
                  for each in (model, spoilt))  # fmt: skip
    for left, right in zip(only(one, aligner="ridge"), only(other, aligner="ridge"), strict=True):
        assert left.predicted.equal(right.predicted)


def test_the_protocol_aligned_c_is_the_aligner_with_the_seed_of_the_draw(toy: Toy) -> None:
    """An option cannot hold the seed fixed."""
    options = {"epochs": 1, "batch": 4, "lr": 0.05}
    subject, tasks = average(toy), encoded(toy)
    protocols = [aligner("aligned-c", options=options, seeds=2), EvaluationProtocol("aligned-c", options, seeds=2)]
    scores = list(evaluate([subject], protocols, tasks))
    pair, head = by_hand(tasks, subject.models["where"], "where", "train")
    for name in ("current", "aligned-c"):
        for seed, item in enumerate(only(scores, task="where", protocol=name)):
            classifier = AlignedC(epochs=1, batch=4, lr=0.05, seed=seed).fit(pair, head).classifier
            assert item.record.seed == seed
            assert item.predicted.equal(says(classifier, tasks, subject.models["where"], "where"))


def test_mistakes(toy: Toy) -> None:
    with pytest.raises(RecipeError, match=r"aligner 'ridge' makes the head that is scored: its protocol is 'current'"):
        EvaluationProtocol("knn", aligner="ridge")
    with pytest.raises(RecipeError, match="unknown aligner 'rigde'; did you mean 'ridge'"):
        scored(toy, [average(toy)], [aligner("rigde")])
    head = Head(Linear(torch.eye(2)), ("a", "b"))
    evidence = Evidence(head, Features(torch.ones(3, 2), "toy", "train"))
    with pytest.raises(RecipeError, match="an aligner needs the expert's features of its inputs of 'toy', got none"):
        Aligned(Ridge()).build(evidence)
    assert isinstance(aligner("ridge", options={"strength": 0.1}).builder(), Aligned)


def test_a_name_is_a_protocol_or_an_aligner() -> None:
    assert EvaluationProtocol.of("knn") == EvaluationProtocol("knn")
    assert EvaluationProtocol.of("ridge") == aligner("ridge")
    assert EvaluationProtocol.of("aligned-c").aligner is None
    assert EvaluationProtocol.of(aligner("ridge", shots=3)).shots == 3
    with pytest.raises(RecipeError, match=r"unknown protocol 'kn'; did you mean 'knn'\?"):
        EvaluationProtocol.of("kn")


def test_two_aligners_are_two_ways(toy: Toy) -> None:
    """And the same one twice is a mistake."""
    with pytest.raises(RecipeError, match="two protocols score 'average' in the same way"):
        scored(toy, [average(toy)], [aligner("ridge"), aligner("ridge", seeds=2)])
    scores = scored(toy, [average(toy)], [aligner("ridge"), aligner("linear"), aligner("affine")])
    records = [item.record for item in scores if item.record.protocol != "joint"]
    assert [record.aligner for record in records] == ["ridge", "linear", "affine"] * 2
    assert len({record.way for record in records if record.task == "where"}) == 3
