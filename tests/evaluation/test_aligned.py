"""Reading a merge through an aligner: what a question gives is what fitting by hand gives, wherever it is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.evaluation.test_evaluate import Toy, make_toy, only

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.aligner import Aligner
from orthomerge.alignment.auto import Auto
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.alignment.rigid import Orthogonal
from orthomerge.alignment.surgery import Surgery
from orthomerge.data.sampling import few_shot
from orthomerge.errors import RecipeError
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.evaluate import Bench, Question, evaluate
from orthomerge.evaluation.protocol import Evidence
from orthomerge.features.features import FeaturePair, Features
from orthomerge.heads import Classifier, Head, Linear
from orthomerge.records import Access, Record


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


def ask(aligner: str, access: Access = "inductive", **more: Any) -> Question:
    return Question("current", aligner=aligner, access=access, **more)


def by_hand(bench: Bench, toy: Toy, task: str, split: Any, rows: Any = None) -> tuple[FeaturePair, Head]:
    """Unlabelled features of some inputs under `average` and under the task's expert, and the expert's head."""
    merged, expert = toy.folder / "out" / "average", toy.experts.models[task]
    rows = torch.arange(len(toy.tasks[task][split])) if rows is None else torch.as_tensor(rows)
    both = (bench.features(model, task, split).take(rows).unlabelled() for model in (merged, expert))
    return FeaturePair(*both), bench.head(expert, task)


def said(classifier: Classifier, bench: Bench, toy: Toy, task: str) -> torch.Tensor:
    return classifier(bench.features(toy.folder / "out" / "average", task, "test").values).argmax(1)


@pytest.mark.parametrize(
    ("name", "options", "aligner"),
    [
        ("ridge", {}, Ridge()),
        ("orthogonal", {"kappa": 0.1}, Orthogonal(kappa=0.1)),
        ("auto", {}, Auto()),
        ("surgery", {"steps": 20, "rank": 4}, Surgery(steps=20, rank=4)),
    ],
)
def test_a_question_is_fitting_by_hand(
    toy: Toy, cache: Path, name: str, options: dict[str, Any], aligner: Aligner
) -> None:
    bench = toy.bench(cache)
    questions = [ask(name, options=options, shots=4, seeds=2), ask(name, "transductive", options=options)]
    found = list(evaluate(bench, [toy.merged("average")], questions))
    for task in toy.tasks:
        labels = toy.tasks[task]["train"].labels
        assert labels is not None
        for seed in range(2):
            pair, head = by_hand(bench, toy, task, "train", few_shot(labels, 4, seed=seed))
            fit = replace(aligner, seed=seed) if isinstance(aligner, Surgery) else aligner
            ((record, predicted),) = only(found, task=task, access="inductive", seed=seed)
            assert predicted.equal(said(fit.fit(pair, head).classifier, bench, toy, task))
            assert (record.protocol, record.aligner, record.options) == ("current", name, options)
            assert (record.shots, record.support) == (4, "train")
            assert (record.extra_parameters > 0) == (name == "surgery")
        ((record, predicted),) = only(found, task=task, access="transductive")
        assert predicted.equal(said(aligner.fit(*by_hand(bench, toy, task, "test")).classifier, bench, toy, task))
        assert record.support == "test"


def test_the_expert_s_head_is_what_is_aligned(toy: Toy, cache: Path) -> None:
    """An expert read through an aligner is itself, and aligning a merge wins back what it lost."""
    questions = [Question("current"), ask("ridge"), ask("auto")]
    found = list(evaluate(toy.bench(cache), [toy.experts, toy.merged("average")], questions))
    for task in toy.tasks:
        current, ridge, auto = (
            predicted for record, predicted in only(found, method="expert", task=task) if record.protocol != "joint"
        )
        assert ridge.equal(current)
        assert auto.equal(current)
    unaligned, aligned = (
        np.mean([record.value for record, _ in only(found, method="average", protocol="current", aligner=aligner)])
        for aligner in (None, "ridge")
    )
    assert aligned > unaligned + 0.1


def test_the_seed_of_a_question_is_the_aligner_s(toy: Toy, cache: Path) -> None:
    """Where it has one; an option cannot hold it fixed."""
    bench, options = toy.bench(cache), {"epochs": 1, "batch": 4, "lr": 0.05}
    questions = [ask("aligned-c", options=options, seeds=2)]
    found = only(list(evaluate(bench, [toy.merged("average")], questions)), task="where", aligner="aligned-c")
    pair, head = by_hand(bench, toy, "where", "train")
    for seed, (record, predicted) in enumerate(found):
        made = AlignedC(epochs=1, batch=4, lr=0.05, seed=seed).fit(pair, head).classifier
        assert record.seed == seed
        assert predicted.equal(said(made, bench, toy, "where"))


# What cannot be asked.


def test_mistakes(toy: Toy, cache: Path) -> None:
    for protocol, access in (("current", "data-free"), ("knn", "inductive")):
        with pytest.raises(
            RecipeError, match=r"aligner 'ridge' makes the head that is read, from inputs: its protocol"
        ):
            Question(protocol, aligner="ridge", access=access)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="unknown aligner 'rigde'; did you mean 'ridge'"):
        list(evaluate(toy.bench(cache), [toy.merged("average")], [ask("rigde")]))
    head = Head(Linear(torch.eye(2)), ("a", "b"))
    evidence = Evidence(head, Features(torch.ones(3, 2), "toy", "train"))
    with pytest.raises(RecipeError, match="an aligner needs the expert's features of its inputs of 'toy', got none"):
        Aligned(Ridge()).build(evidence)
    assert isinstance(ask("ridge", options={"strength": 0.1}).reading, Aligned)


def test_two_aligners_are_two_ways(toy: Toy, cache: Path) -> None:
    """And the same one twice is a mistake."""
    same = [ask("ridge"), ask("ridge", seeds=2)]
    with pytest.raises(RecipeError, match="two questions ask 'average' for the same"):
        list(evaluate(toy.bench(cache), [toy.merged("average")], same))
    found = list(evaluate(toy.bench(cache), [toy.merged("average")], [ask("ridge"), ask("linear"), ask("affine")]))
    records: list[Record] = [record for record, _ in found if record.protocol != "joint"]
    assert [record.aligner for record in records] == ["ridge", "linear", "affine"] * 2
    assert len({record.way for record in records if record.task == "where"}) == 3
