"""Who sees what: evidence holds what the access allows and the protocol declares; shown labels are never scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.evaluation.test_evaluate import COUNTS, Toy, make_toy

from orthomerge.data.sampling import few_shot
from orthomerge.errors import RecipeError
from orthomerge.evaluation.aligned_c import AlignedC
from orthomerge.evaluation.answering import answers
from orthomerge.evaluation.evaluate import Question
from orthomerge.evaluation.metrics import UNSCORED, accuracy, predict
from orthomerge.evaluation.protocol import Evidence, Need, ReadingProtocol
from orthomerge.features.features import Features
from orthomerge.heads import Classifier, Head, Linear


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@dataclass(frozen=True)
class Spy:
    """Keeps the evidence that it got."""

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "teacher"})
    evidence: list[Evidence] = field(default_factory=list)

    def build(self, evidence: Evidence) -> Classifier:
        self.evidence.append(evidence)
        return evidence.head


@dataclass(frozen=True)
class LabelSpy(Spy):
    needs: ClassVar[frozenset[Need]] = frozenset({"features", "labels"})


@dataclass(frozen=True)
class Spied(Question):
    """A question whose protocol is a spy."""

    spy: Spy = field(default_factory=Spy)

    @property
    def reading(self) -> ReadingProtocol:
        return self.spy


@pytest.mark.parametrize(("access", "split"), [("inductive", "train"), ("transductive", "test")])
@pytest.mark.parametrize("shots", [None, 0.5])
def test_evidence_of_a_protocol_that_learns_from_its_teacher(
    toy: Toy, cache: Path, access: str, split: str, shots: float | None
) -> None:
    bench, model, expert = toy.bench(cache), toy.folder / "out" / "average", toy.experts.models["where"]
    question = Spied("aligned-c", access=access, shots=shots, seeds=2)  # type: ignore[arg-type]
    found = answers(bench, model, "where", question)
    assert [answer.seed for answer in found] == [0, 1]
    assert all(len(answer.predicted) == COUNTS["test"] and not answer.extra for answer in found)
    whole = bench.features(model, "where", split)  # type: ignore[arg-type]
    place = {tuple(row): number for number, row in enumerate(whole.values.tolist())}
    for seed, evidence in enumerate(question.spy.evidence):
        assert evidence.support is not None
        assert (evidence.seed, evidence.expert, evidence.support.labels) == (seed, None, None)
        rows = [place[tuple(row)] for row in evidence.support.values.tolist()]
        assert len(set(rows)) == len(rows) == (len(whole) if shots is None else round(len(whole) / 2))
        seen = bench.features(expert, "where", split).values[rows]  # type: ignore[arg-type]
        assert evidence.teacher is not None
        torch.testing.assert_close(evidence.teacher, bench.head(expert, "where")(seen).detach())


def test_labels_that_were_shown_are_not_scored(toy: Toy, cache: Path) -> None:
    bench, model = toy.bench(cache), toy.folder / "out" / "average"
    question = Spied("knn", access="transductive", shots=2, spy=LabelSpy())
    (found,) = answers(bench, model, "where", question)
    labels = toy.tasks["where"]["test"].labels
    assert labels is not None
    shown = sorted(few_shot(labels, 2, seed=0).tolist())
    assert (found.predicted == UNSCORED).nonzero().flatten().tolist() == shown
    (evidence,) = question.spy.evidence
    assert evidence.teacher is None
    assert evidence.support is not None
    assert evidence.support.labels is not None
    assert sorted(evidence.support.labels.tolist()) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(RecipeError, match=r"needs labels cannot be scored .* of 37 inputs 0 would remain"):
        answers(bench, model, "where", Spied("knn", access="transductive", spy=LabelSpy()))


def test_access_that_does_not_go_with_a_protocol() -> None:
    with pytest.raises(RecipeError, match="'knn' needs features, labels, which does not go with 'data-free' access"):
        Question("knn")
    with pytest.raises(RecipeError, match="must come from another split than the scored one, got 'test' for both"):
        Question("knn", access="inductive", support="test")


def test_a_shuffled_teacher_teaches_nothing() -> None:
    """What a protocol gains comes from the expert: with the expert's logits on the wrong inputs it says nothing."""
    head = Head(Linear(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])), ("a", "b", "c"))
    generator = torch.Generator().manual_seed(5)

    def clusters(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % 3
        means = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])[labels]
        return means + torch.randn(count, 2, generator=generator), labels

    (values, labels), (test, truth) = clusters(300), clusters(600)
    support, teacher = Features(values, "toy", "train"), 4 * torch.eye(3)[labels]
    shuffled = teacher[torch.randperm(300, generator=generator)]
    taught, spoilt = (AlignedC().build(Evidence(head, support, each)) for each in (teacher, shuffled))
    assert accuracy(predict(taught, test), truth) > 0.98
    sure, unsure = (float(each(test).softmax(1).amax(1).mean()) for each in (taught, spoilt))
    assert sure > 0.9
    assert unsure < 0.45  # of three classes: next to nothing is said
