"""Who sees what: cross-fitting never trains on what it scores, labels stay where they belong, nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from orthomerge.data.task import Split
from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.evaluation.access import (
    access_of,
    cross_fitted,
    fold_numbers,
    protocol_predictions,
    transductive,
)
from orthomerge.evaluation.aligned_c import AlignedC
from orthomerge.evaluation.controls import bound, chance, other_inputs, permuted_labels, shuffled_teacher
from orthomerge.evaluation.current import Current
from orthomerge.evaluation.knn import Knn
from orthomerge.evaluation.metrics import UNSCORED, accuracy, predict, predictions, scored
from orthomerge.evaluation.probe import Probe
from orthomerge.evaluation.protocol import Evidence, Need
from orthomerge.features.features import Features
from orthomerge.heads import Head, Linear
from orthomerge.records import Access

N = 23
HEAD = Head(Linear(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])), ("a", "b", "c"))


def features_of(count: int = N, *, split: Split = "test", task: str = "toy", seed: int = 0) -> Features:
    """Three clear clusters; the label of input i is i mod 3."""
    labels = torch.arange(count) % 3
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])[labels]
    return Features(values + torch.randn(count, 2, generator=generator), task, split, labels)


@dataclass
class _Reader:
    """Predicts class 1 for what it has seen and class 0 for what it has not."""

    seen: set[tuple[float, ...]]
    scored: list[torch.Tensor]
    labels: tuple[str, ...] = HEAD.labels

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        self.scored.append(features)
        known = torch.tensor([float(tuple(row) in self.seen) for row in features.tolist()])
        return torch.stack([1 - known, known, torch.full_like(known, -1)], 1)


@dataclass
class Spy:
    """Keeps the evidence that it got."""

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "teacher"})
    evidence: list[Evidence] = field(default_factory=list)
    readers: list[_Reader] = field(default_factory=list)

    def build(self, evidence: Evidence) -> _Reader:
        assert evidence.support is not None
        self.evidence.append(evidence)
        self.readers.append(_Reader({tuple(row) for row in evidence.support.values.tolist()}, []))
        return self.readers[-1]


@dataclass
class LabelSpy(Spy):
    needs: ClassVar[frozenset[Need]] = frozenset({"features", "labels"})


@pytest.mark.parametrize(
    ("support", "options", "access"),
    [
        (None, {}, "data-free"),
        ("train", {}, "inductive"),
        ("val", {}, "inductive"),
        ("test", {"folds": True}, "cross-fitted"),
        ("test", {}, "transductive"),
        ("train", {"scored": "val"}, "inductive"),
        ("val", {"scored": "val"}, "transductive"),
        ("test", {"scored": "val"}, "inductive"),
    ],
)
def test_access(support: Split | None, options: dict[str, Any], access: Access) -> None:
    assert access_of(support, **options) == access


def test_folds_of_another_split() -> None:
    with pytest.raises(RecipeError, match="folds are of the scored split 'test', but the support comes from 'train'"):
        access_of("train", folds=True)


def test_folds_are_even_and_seeded() -> None:
    numbers = fold_numbers(N, seed=3)
    assert sorted(numbers.bincount().tolist()) == [4, 4, 5, 5, 5]
    assert torch.equal(numbers, fold_numbers(N, seed=3))
    assert not torch.equal(numbers, fold_numbers(N, seed=4))


@pytest.mark.parametrize(("count", "folds"), [(4, 5), (9, 1)])
def test_too_few_for_folds(count: int, folds: int) -> None:
    with pytest.raises(RecipeError, match=rf"'folds' must be between 2 and the number of inputs \({count}\)"):
        fold_numbers(count, folds=folds)


def test_cross_fitting_never_builds_on_what_it_scores() -> None:
    test, spy = features_of(), Spy()
    teacher = torch.arange(N * 3.0).reshape(N, 3)
    predicted = protocol_predictions(spy, HEAD, access="cross-fitted", test=test, test_teacher=teacher, seed=7)
    assert predicted.tolist() == [0] * N  # all unseen when they were scored
    assert len(spy.evidence) == 5
    where = {tuple(row): place for place, row in enumerate(test.values.tolist())}
    all_scored: list[int] = []
    for evidence, reader in zip(spy.evidence, spy.readers, strict=True):
        assert evidence.support is not None
        assert evidence.teacher is not None
        assert evidence.seed == 7
        assert evidence.support.labels is None
        built = [where[tuple(row)] for row in evidence.support.values.tolist()]
        assert torch.equal(evidence.teacher, teacher[built])  # every input with its own logits
        held_out = [where[tuple(row)] for row in torch.cat(reader.scored).tolist()]
        assert sorted(built + held_out) == list(range(N))
        all_scored += held_out
    assert sorted(all_scored) == list(range(N))  # each once, none lost


def test_cross_fitting_with_labels_shows_only_those_of_other_folds() -> None:
    spy = LabelSpy()
    predicted = protocol_predictions(spy, HEAD, access="cross-fitted", test=features_of())
    assert predicted.tolist() == [0] * N
    assert all(evidence.support is not None and evidence.support.labels is not None for evidence in spy.evidence)
    assert all(evidence.teacher is None for evidence in spy.evidence)


def test_cross_fitting_on_a_part() -> None:
    spy, test, places = Spy(), features_of(), torch.arange(0, N, 2)
    protocol_predictions(spy, HEAD, access="cross-fitted", test=test, test_teacher=torch.zeros(N, 3), places=places)
    allowed = {tuple(row) for row in test.values[places].tolist()}
    assert all(reader.seen < allowed for reader in spy.readers)
    assert sum(len(allowed) - len(reader.seen) for reader in spy.readers) == len(places)


def test_a_fold_without_support() -> None:
    with pytest.raises(RecipeError, match=r"fold \d of 5 leaves no support; give more inputs than 1"):
        cross_fitted(lambda rows: HEAD, torch.zeros(9, 2), pool=torch.tensor([3]))


def test_transductive_sees_all() -> None:
    spy = Spy()
    predicted = protocol_predictions(
        spy, HEAD, access="transductive", test=features_of(), test_teacher=torch.zeros(N, 3)
    )
    assert predicted.tolist() == [1] * N
    (evidence,) = spy.evidence
    assert evidence.support is not None
    assert evidence.support.labels is None
    assert len(evidence.support) == N


def test_transductive_on_a_part_scores_all_the_same() -> None:
    predicted = protocol_predictions(
        Spy(),
        HEAD,
        access="transductive",
        test=features_of(),
        test_teacher=torch.zeros(N, 3),
        places=torch.tensor([4, 2]),
    )
    assert predicted.nonzero().flatten().tolist() == [2, 4]


@pytest.mark.parametrize("protocol", [Knn(), Probe()])
def test_labelled_support_is_not_scored(protocol: Any) -> None:
    test = features_of()
    places = torch.tensor([0, 1, 2, 9, 10, 11])
    predicted = protocol_predictions(protocol, HEAD, access="transductive", test=test, places=places)
    assert (predicted == UNSCORED).nonzero().flatten().tolist() == places.tolist()
    assert test.labels is not None
    kept, labels = scored(predicted, test.labels)
    assert len(kept) == N - 6
    assert accuracy(kept, labels) == 1


@pytest.mark.parametrize("places", [None, torch.arange(N)])
def test_labels_and_scores_on_the_same_inputs(places: torch.Tensor | None) -> None:
    with pytest.raises(RecipeError, match=r"needs labels cannot be scored .* of 23 inputs 0 would remain"):
        protocol_predictions(Knn(), HEAD, access="transductive", test=features_of(), places=places)


def test_inductive() -> None:
    spy, support, teacher = Spy(), features_of(9, split="train", seed=1), torch.ones(9, 3)
    predicted = protocol_predictions(
        spy, HEAD, access="inductive", test=features_of(), support=support, teacher=teacher, seed=2
    )
    assert predicted.tolist() == [0] * N
    (evidence,) = spy.evidence
    assert evidence.support is not None
    assert evidence.support.labels is None
    assert support.labels is not None
    assert evidence.teacher is teacher
    assert evidence.seed == 2


def test_inductive_with_labels() -> None:
    support, test = features_of(9, split="val", seed=1), features_of()
    predicted = protocol_predictions(Knn(), HEAD, access="inductive", test=test, support=support)
    assert test.labels is not None
    assert accuracy(predicted, test.labels) == 1


def test_data_free() -> None:
    test = features_of()
    predicted = protocol_predictions(Current(), HEAD, access="data-free", test=test)
    assert torch.equal(predicted, predictions(HEAD(test.values)))


@pytest.mark.parametrize("access", ["inductive", "cross-fitted"])
def test_evidence_can_be_spoilt_before_it_is_used(access: Access) -> None:
    spy, support = Spy(), features_of(9, split="train", seed=1)
    given: dict[str, Any] = (
        {"support": support, "teacher": torch.arange(27.0).reshape(9, 3)}
        if access == "inductive"
        else {"test_teacher": torch.arange(N * 3.0).reshape(N, 3)}
    )
    protocol_predictions(
        spy, HEAD, access=access, test=features_of(), spoil=lambda evidence: shuffled_teacher(evidence, seed=1), **given
    )
    plain = Spy()
    protocol_predictions(plain, HEAD, access=access, test=features_of(), **given)
    for one, other in zip(spy.evidence, plain.evidence, strict=True):
        assert one.teacher is not None
        assert other.teacher is not None
        assert not torch.equal(one.teacher, other.teacher)
        assert sorted(one.teacher.tolist()) == other.teacher.tolist()


TEST, TRAIN = features_of(), features_of(9, split="train")


@pytest.mark.parametrize(
    ("protocol", "given", "message"),
    [
        (Current(), {"access": "transductive"}, "Current needs nothing, which does not go with 'transductive' access"),
        (Knn(), {"access": "data-free"}, "Knn needs features, labels, which does not go with 'data-free' access"),
        (Knn(), {"access": "inductiv"}, r"unknown access 'inductiv'; did you mean 'inductive'\?"),
        (Knn(), {"access": "inductive"}, "'knn' needs features of support inputs, got none"),
        (Knn(), {"access": "inductive", "support": TEST}, "must come from another split .* got 'test' for both"),
        (AlignedC(), {"access": "inductive", "support": TRAIN}, "'aligned-c' needs the expert's logits"),
        (AlignedC(), {"access": "transductive"}, "'aligned-c' needs the expert's logits"),
        (Knn(), {"access": "cross-fitted", "support": TRAIN}, "'cross-fitted' access the support is the scored inputs"),
        (
            Knn(),
            {"access": "inductive", "support": TRAIN, "places": torch.tensor([0])},
            "'places' are rows of the scored inputs: only cross-fitted and transductive",
        ),
    ],
)
def test_what_does_not_go_together(protocol: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        protocol_predictions(protocol, HEAD, test=TEST, **given)


def test_support_of_another_task() -> None:
    with pytest.raises(IncompatibleError, match="the support is of 'other' but the scored inputs are of 'toy'"):
        protocol_predictions(
            Knn(), HEAD, access="inductive", test=TEST, support=features_of(9, split="train", task="other")
        )


def test_logits_of_other_inputs() -> None:
    with pytest.raises(IncompatibleError, match="23 inputs of 'toy' but 22 rows of expert's logits"):
        protocol_predictions(AlignedC(), HEAD, access="transductive", test=TEST, test_teacher=torch.zeros(22, 3))


@pytest.mark.parametrize("places", [[0, 0], [-1], [N], [], [0.5], [[1]]])
def test_places_that_are_none(places: list[Any]) -> None:
    with pytest.raises(IncompatibleError, match=r"places must be distinct row numbers \(int64\) in 0\.\.22"):
        transductive(lambda rows: HEAD, TEST.values, pool=torch.tensor(places))


class TestControls:
    def evidence(self) -> Evidence:
        support = features_of(300, split="train", seed=5)
        assert support.labels is not None
        return Evidence(HEAD, support, 4 * torch.eye(3)[support.labels])

    def test_a_shuffled_teacher_teaches_nothing(self) -> None:
        evidence, test = self.evidence(), features_of(600)
        spoilt = shuffled_teacher(evidence, seed=0)
        assert test.labels is not None
        assert evidence.teacher is not None
        assert spoilt.teacher is not None
        assert torch.equal(spoilt.teacher.sum(0), evidence.teacher.sum(0))
        assert not torch.equal(spoilt.teacher, evidence.teacher)
        again = shuffled_teacher(evidence, seed=0).teacher
        assert again is not None
        assert torch.equal(spoilt.teacher, again)
        good, bad = (
            accuracy(predict(AlignedC().build(given), test.values), test.labels) for given in (evidence, spoilt)
        )
        assert good > 0.98
        assert bad < 0.6

    def test_shuffling_one(self) -> None:
        evidence = Evidence(HEAD, features_of(1), torch.zeros(1, 3))
        with pytest.raises(RecipeError, match="shuffling needs at least two support inputs, got 1"):
            shuffled_teacher(evidence, seed=0)

    def test_inputs_of_another_task(self) -> None:
        other, logits = features_of(7, split="train", task="other"), torch.zeros(7, 3)
        spoilt = other_inputs(self.evidence(), support=other, teacher=logits)
        assert spoilt.support is not None
        assert spoilt.support.task == "other"
        assert spoilt.support.labels is None
        assert spoilt.teacher is logits
        assert other_inputs(self.evidence(), support=other).teacher is None

    def test_inputs_of_the_same_task(self) -> None:
        with pytest.raises(RecipeError, match="must come from another task, got 'toy' for 'toy'"):
            other_inputs(self.evidence(), support=features_of(7))

    def test_logits_that_do_not_fit_the_other_inputs(self) -> None:
        with pytest.raises(IncompatibleError, match=r"must be \(7, 3\), got \(8, 3\)"):
            other_inputs(self.evidence(), support=features_of(7, task="other"), teacher=torch.zeros(8, 3))

    def test_permuted_labels_score_chance(self) -> None:
        labels = torch.arange(3000) % 3
        permuted = permuted_labels(labels, seed=0)
        assert torch.equal(permuted.bincount(), labels.bincount())
        assert torch.equal(permuted, permuted_labels(labels, seed=0))
        assert accuracy(labels, permuted) == pytest.approx(chance(labels, permuted), abs=0.03)

    def test_chance_by_hand(self) -> None:
        # predictions 3/4 and 1/4, labels 1/2, 1/4 and 1/4: 3/8 + 1/16
        assert chance(torch.tensor([0, 0, 0, 1]), torch.tensor([2, 0, 1, 0])) == 7 / 16

    def test_bound_by_hand(self) -> None:
        labels = torch.tensor([2, 0, 1, 0])
        # chance 7/16 as above; a head that is right once, and one that is right thrice
        assert bound(torch.tensor([0, 0, 0, 1]), torch.tensor([2, 1, 2, 2]), labels) == 7 / 16
        assert bound(torch.tensor([0, 0, 0, 1]), torch.tensor([2, 0, 1, 1]), labels) == 3 / 4

    def test_one_label_cannot_be_permuted(self) -> None:
        with pytest.raises(IncompatibleError, match=r"a list of at least two labels, got \(1,\)"):
            permuted_labels(torch.zeros(1), seed=0)
