"""Reading a merge through an aligner: what a question gives is what fitting by hand gives, wherever it is done."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.evaluation.test_evaluate import COUNTS, Toy, make_toy, only

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.aligner import Aligner
from orthomerge.alignment.auto import Auto
from orthomerge.alignment.orthogonal import Orthogonal
from orthomerge.alignment.ridge import Ridge
from orthomerge.alignment.surgery import Surgery
from orthomerge.data.sampling import few_shot
from orthomerge.errors import OrthomergeError, RecipeError
from orthomerge.evaluation.access import fold_numbers
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.answering import reading
from orthomerge.evaluation.controls import chance, shuffled_teacher
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
            assert (record.shots, record.support, record.control) == (4, "train", None)
            assert (record.extra_parameters > 0) == (name == "surgery")
        ((record, predicted),) = only(found, task=task, access="transductive")
        assert predicted.equal(said(aligner.fit(*by_hand(bench, toy, task, "test")).classifier, bench, toy, task))
        assert record.support == "test"


def test_draws_side_by_side_or_one_by_one(toy: Toy, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side they go in groups; one by one a seed does not know of the others, to the bit."""
    groups: list[list[int]] = []
    fit_each = Surgery.fit_each

    def counted(self: Surgery, pairs: Any, head: Head, seeds: Any) -> Any:
        groups.append(list(seeds))
        return fit_each(self, pairs, head, seeds)

    monkeypatch.setattr(Surgery, "fit_each", counted)
    monkeypatch.setattr("orthomerge.evaluation.aligned._FITS", 2)
    asked = ask("surgery", options={"steps": 20, "rank": 4}, shots=4, seeds=3)
    subjects = [toy.merged("average")]
    together = list(evaluate(toy.bench(cache), subjects, [asked]))
    assert groups == [[0, 1], [2]] * len(toy.tasks)
    groups.clear()
    alone = list(evaluate(toy.bench(cache), subjects, [replace(asked, together=False)]))
    assert groups == [[0], [1], [2]] * len(toy.tasks)
    assert [record for record, _ in together] == [record for record, _ in alone]
    assert all(one.equal(other) for (_, one), (_, other) in zip(together, alone, strict=True))
    cut = list(evaluate(toy.bench(cache), subjects, [replace(asked, first=2, seeds=1)]))
    assert [predicted.tolist() for record, predicted in cut if record.aligner] == [
        predicted.tolist() for record, predicted in alone if record.aligner and record.seed == 2
    ]


def test_groups_of_as_many_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order they come in; and no more numbers at a time than are allowed."""
    head = Head(Linear(torch.randn(3, 5, generator=torch.Generator().manual_seed(0))), ("a", "b", "c"))
    way = Aligned(Surgery(steps=5, rank=2))

    def evidence(count: int, seed: int) -> Evidence:
        values = torch.randn(2, count, 5, generator=torch.Generator().manual_seed(seed))
        return Evidence(
            head, Features(values[0], "toy", "train"), seed=seed, expert=Features(values[1], "toy", "train")
        )

    given = [evidence(count, seed) for seed, count in enumerate((4, 6, 4, 6, 4))]
    probe = torch.randn(7, 5, generator=torch.Generator().manual_seed(9))
    for numbers in (1 << 20, 45, 1):
        monkeypatch.setattr("orthomerge.evaluation.aligned._NUMBERS", numbers)
        for each, made in zip(given, way.build_each(given), strict=True):
            torch.testing.assert_close(made(probe), way.build(each)(probe), atol=1e-5, rtol=1e-5)


def test_cross_fitting_is_fitting_without_each_fold(toy: Toy, cache: Path) -> None:
    bench = toy.bench(cache)
    found = list(evaluate(bench, [toy.merged("average")], [ask("ridge", "cross-fitted")]))
    for task in toy.tasks:
        ((_, predicted),) = only(found, task=task, aligner="ridge")
        fold = fold_numbers(COUNTS["test"], seed=0)
        for number in range(5):
            rest = (fold != number).nonzero().flatten()
            made = Ridge().fit(*by_hand(bench, toy, task, "test", rest)).classifier
            assert predicted[fold == number].equal(said(made, bench, toy, task)[fold == number])


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


def test_workers_change_nothing(toy: Toy, tmp_path: Path) -> None:
    """In processes of their own, which find the features in the cache; records come in the same order."""
    questions = [
        Question("current"),
        ask("ridge", shots=4, seeds=2),
        ask("aligned-c", "cross-fitted", options={"epochs": 1}),
        ask("surgery", options={"steps": 5, "rank": 2}),
        ask("ridge", control="shuffled-teacher"),
        ask("orthogonal", control="other-task", shots=0.5),
        Question("knn", shots=2, access="inductive"),
    ]
    subjects = [toy.experts, toy.merged("average")]
    runs = [
        list(evaluate(toy.bench(tmp_path), subjects, questions, suite="toy", workers=workers)) for workers in (1, 2)
    ]
    here, there = ([record for record, _ in run] for run in runs)
    assert len(here) == 2 * 2 * 8 + 2
    assert here == there
    assert all(one.equal(other) for (_, one), (_, other) in zip(*runs, strict=True))


def test_a_worker_that_dies_is_told(toy: Toy, tmp_path: Path) -> None:
    """Killed from outside, as by a system that is out of memory: no hang, no traceback of the pool's."""
    questions = [Question("current"), ask("aligned-c", shots=4, options={"epochs": 100_000})]
    answers = evaluate(toy.bench(tmp_path), [toy.merged("average")], questions, suite="toy", workers=2)
    next(answers)  # the other one would take minutes
    for process in active_children():
        process.kill()
    with pytest.raises(OrthomergeError, match=r"ended without a word.*use fewer workers"):
        list(answers)


# Controls.


def test_a_shuffled_teacher_by_hand(toy: Toy, cache: Path) -> None:
    bench, question = toy.bench(cache), ask("ridge", control="shuffled-teacher", seeds=2)
    found = list(evaluate(bench, [toy.merged("average")], [Question("current"), ask("ridge"), question]))
    for task in toy.tasks:
        pair, head = by_hand(bench, toy, task, "train")
        truth = torch.tensor(toy.tasks[task]["test"].labels)
        ((plain, _),) = only(found, task=task, protocol="current", aligner=None)
        ((good, _),) = only(found, task=task, aligner="ridge", control=None)
        for record, predicted in only(found, task=task, control="shuffled-teacher"):
            order = torch.randperm(len(pair.expert), generator=torch.Generator().manual_seed(record.seed))
            made = Ridge().fit(FeaturePair(pair.merged, pair.expert.take(order)), head).classifier
            assert predicted.equal(said(made, bench, toy, task))
            assert record.bound == max(plain.value, chance(predicted, truth))
            assert record.value < good.value - 0.2
            assert record.aligner == "ridge"


def test_another_tasks_inputs_by_hand(toy: Toy, cache: Path) -> None:
    """What this task's expert makes of them is what the head is fitted to."""
    bench, question = toy.bench(cache), ask("ridge", control="other-task")
    found = list(evaluate(bench, [toy.merged("average")], [question]))
    for task, other in (("bright", "where"), ("where", "bright")):
        merged, expert = toy.folder / "out" / "average", toy.experts.models[task]
        both = (bench.features(model, other, "train").unlabelled() for model in (merged, expert))
        made = Ridge().fit(FeaturePair(*both), bench.head(expert, task)).classifier
        ((record, predicted),) = only(found, task=task, control="other-task")
        assert predicted.equal(said(made, bench, toy, task))
        assert record.bound is not None


def test_a_shuffled_teacher_takes_features_and_logits_along() -> None:
    values = torch.arange(8.0).reshape(4, 2)
    support, head = Features(values, "toy", "train"), Head(Linear(torch.eye(2)), ("a", "b"))
    evidence = Evidence(head, support, teacher=values + 10, expert=replace(support, values=values + 20))
    spoilt = shuffled_teacher(evidence, seed=3)
    assert spoilt.teacher is not None
    assert spoilt.expert is not None
    assert torch.equal(spoilt.teacher + 10, spoilt.expert.values)
    assert not torch.equal(spoilt.teacher, values + 10)
    assert spoilt.support is support


# What cannot be asked.


def test_mistakes(toy: Toy, cache: Path) -> None:
    for protocol, access in (("current", "data-free"), ("knn", "inductive")):
        with pytest.raises(
            RecipeError, match=r"aligner 'ridge' makes the head that is read, from inputs: its protocol"
        ):
            Question(protocol, aligner="ridge", access=access)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="which is not 'transductive' access"):
        ask("ridge", "transductive", control="other-task")
    with pytest.raises(RecipeError, match="unknown aligner 'rigde'; did you mean 'ridge'"):
        list(evaluate(toy.bench(cache), [toy.merged("average")], [ask("rigde")]))
    head = Head(Linear(torch.eye(2)), ("a", "b"))
    evidence = Evidence(head, Features(torch.ones(3, 2), "toy", "train"))
    with pytest.raises(RecipeError, match="an aligner needs the expert's features of its inputs of 'toy', got none"):
        Aligned(Ridge()).build(evidence)
    assert isinstance(reading("current", "ridge", {"strength": 0.1}), Aligned)


def test_two_aligners_are_two_ways(toy: Toy, cache: Path) -> None:
    """And the same one twice is a mistake."""
    same = [ask("ridge"), ask("ridge", seeds=2)]
    with pytest.raises(RecipeError, match="two questions ask 'average' for the same"):
        list(evaluate(toy.bench(cache), [toy.merged("average")], same))
    found = list(evaluate(toy.bench(cache), [toy.merged("average")], [ask("ridge"), ask("linear"), ask("affine")]))
    records: list[Record] = [record for record, _ in found if record.protocol != "joint"]
    assert [record.aligner for record in records] == ["ridge", "linear", "affine"] * 2
    assert len({record.way for record in records if record.task == "where"}) == 3
