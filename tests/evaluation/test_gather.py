"""Who sees what: evidence holds what the access allows and the protocol declares; shown labels are never scored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.analysis.making import COUNTS, Toy
from tests.evaluation.making import average, encoded

from orthomerge.core.errors import RecipeError
from orthomerge.data.sampling import few_shot
from orthomerge.data.task import Split
from orthomerge.evaluation.evidence import Builder, Draw, Evidence, Need, answers, gather
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.protocol import EvaluationProtocol
from orthomerge.evaluation.protocols import PROTOCOLS
from orthomerge.models.heads import Classifier, head_of


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


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("access", ACCESS)
def test_every_protocol_under_every_access(toy: Toy, name: str, access: Any) -> None:
    """The same draw gives the same answer, another one may not; inputs of the other splits make no difference."""
    protocol = EvaluationProtocol(name, shots=3, seeds=2, access=access)
    model = average(toy).models["where"]
    first, again = (list(answers(protocol, encoded(toy), model, "where")) for _ in range(2))
    assert [answer.seed for answer in first] == ([0, 1] if protocol.needs else [0])
    assert all(one.predicted.equal(other.predicted) for one, other in zip(first, again, strict=True))
    split = ACCESS[access]
    used = {name: part for name, part in toy.tasks["where"].splits.items() if name in (split, "test")}
    alone = encoded(toy, tasks={"where": replace(toy.tasks["where"], splits=used)})
    for one, other in zip(first, answers(protocol, alone, model, "where"), strict=True):
        assert one.predicted.equal(other.predicted)
    later = list(answers(replace(protocol, first=1, seeds=1), encoded(toy), model, "where"))
    assert [answer.predicted.tolist() for answer in later] == [first[-1].predicted.tolist()]


def test_a_model_that_is_more_than_a_head_is_scored_as_it_is(toy: Toy) -> None:
    """Only what needs evidence sees the head behind it."""
    from orthomerge.models.extras import SurgeryHead

    model, tasks = average(toy).models["where"], encoded(toy)
    head = head_of(model.head("where"))
    extra = SurgeryHead(head, torch.zeros(4, head.width), torch.zeros(head.width, 4))
    more = model.with_heads({**model.heads, "where": extra})
    whole = gather(frozenset(), tasks, more, "where", "train", Draw(0))
    assert id(whole.head) == id(extra)
    assert gather(frozenset({"features"}), tasks, more, "where", "train", Draw(0)).head is head
    (answer,) = answers(EvaluationProtocol(), tasks, more, "where")
    assert answer.extra == 8 * head.width
