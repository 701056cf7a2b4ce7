"""Scores of a tiny benchmark: evidence is what the access allows and the protocol declares, and records say how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.analysis.making import CHEAP, COUNTS, CURRENT, PROCESSOR, PROTOCOLS, Toy, only, same_predictions, task_with

from orthomerge import Model, export
from orthomerge.alignment.aligners import make_aligner
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.data.task import Examples, Split, Task, few_shot
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.evaluate import Subject, answers, contamination_notes, evaluate, gather, joint_answers
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.protocols import EvaluationProtocol, Evidence, Need
from orthomerge.evaluation.tables import lines
from orthomerge.merging.merge import MergedTensors
from orthomerge.models import encoding
from orthomerge.models.encoding import extract
from orthomerge.models.features import FeatureCache, FeaturePair, Features
from orthomerge.models.heads import Classifier, Head, Linear, head_of
from orthomerge.models.skeleton import quiet

ALIGNED = EvaluationProtocol("aligned-c", CHEAP)


def stock_predictions(folder: Path, examples: Examples) -> list[int]:
    with quiet(), torch.no_grad():
        from transformers import AutoModelForImageClassification

        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        logits: torch.Tensor = model(**PROCESSOR(examples.inputs)).logits
        return logits.argmax(1).tolist()


def test_every_test_example_is_counted_and_a_record_says_how(toy: Toy) -> None:
    merged = toy.total()
    scores = toy.scored([toy.alone(), merged], PROTOCOLS)
    assert len(scores) == 2 * 2 * (1 + 2 + 2 + 1 + 1 + 1 + 1) + 2
    for item in scores:
        record, answers = item.record, item.predictions
        start = 3 if (record.protocol, record.task) == ("joint", "where") else 0
        assert answers.truth.tolist() == (toy.encoded().labels(record.task, "test") + start).tolist()
        # Only labelled support from the test split itself is not scored: 3 shots of 3 classes.
        shown = 9 if (record.protocol, record.access) == ("knn", "transductive") else 0
        assert len(answers.predicted) == COUNTS["test"]
        assert record.examples == int(answers.scored.sum()) == COUNTS["test"] - shown
        assert record.low <= record.value == int(answers.hits.sum()) / record.examples <= record.high
    own = only(scores, method="task_arithmetic")
    for record in (item.record for item in own):
        assert (record.metric, record.split, record.parameters) == ("accuracy", "test", {"scale": 1.0})
        assert record.inputs == {"model": merged.models[record.task].digest}
        assert (record.extra_parameters > 0) == (record.protocol == "knn")
        assert record.options == {"aligned-c": CHEAP, "probe": {"steps": 5}}.get(record.protocol, {})


def test_current_is_what_the_stock_model_says(toy: Toy, tmp_path: Path) -> None:
    subject = toy.average()
    subject.models["where"].save(tmp_path / "out")
    scores = toy.scored([toy.alone(), subject])
    for task in toy.tasks:
        test = toy.tasks[task]["test"]
        (expert,) = only(scores, method="expert", task=task)
        assert expert.predictions.predicted.tolist() == stock_predictions(toy.folder / task, test)
        export(tmp_path / "out", tmp_path / task, task=task)
        (merged,) = only(scores, method="average", task=task, protocol="current")
        assert merged.predictions.predicted.tolist() == stock_predictions(tmp_path / task, test)
    ours = [only(scores, method=name, protocol="current") for name in ("expert", "average")]
    best, lost = (np.mean([item.record.value for item in items]) for items in ours)
    assert best > 0.8 > lost  # something is lost by merging, or these tests see nothing


def test_what_a_model_has_seen_stays_with_it_and_the_same_protocol_twice(toy: Toy) -> None:
    protocols = [ALIGNED, replace(ALIGNED, options={"epochs": 3}), replace(ALIGNED, access="transductive")]
    rows = lines(item.record for item in toy.scored([toy.average(access="transductive")], protocols))
    assert {line.way.access for line in rows} == {"transductive"}
    titles = ("epochs=2, from train", "epochs=3, from train", "epochs=2")
    assert [line.way.title for line in rows] == [*(f"aligned-c, {title}" for title in titles), "joint"]
    # The same protocol twice
    plain = replace(ALIGNED, access="transductive", models=("average",))
    twice = [plain, replace(plain, seeds=3, support="val")]  # this access takes its support from test anyway
    with pytest.raises(RecipeError, match=r"two protocols score 'average' in the same way: aligned-c, epochs=2 .trans"):
        toy.scored([toy.average()], twice)
    apart = [plain, replace(twice[1], models=("task_arithmetic",))]
    assert len(only(toy.scored([toy.average()], apart), protocol="aligned-c")) == len(toy.tasks)
    with pytest.raises(RecipeError, match="score 'task_arithmetic' in the same way: current"):
        toy.scored([toy.total()], [CURRENT, EvaluationProtocol("current", seeds=2)])


def test_the_same_seed_gives_the_same_records_and_another_other_shots(toy: Toy, tmp_path: Path) -> None:
    """Whatever the number of threads, and whether features are kept or computed anew."""
    threads = torch.get_num_threads()
    runs = []
    try:
        for count, cache in ((1, FeatureCache(tmp_path)), (2, None)):
            torch.set_num_threads(count)
            runs.append(toy.scored([toy.average()], PROTOCOLS[:3], how=replace(toy.encoding, cache=cache)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    one, other = runs
    assert [item.record for item in one] == [item.record for item in other]
    assert all(same_predictions(left, right) for left, right in zip(one, other, strict=True))
    first, second = only(one, protocol="knn", task="where")
    assert not same_predictions(first, second)


def test_every_split_is_encoded_and_a_merge_computed_once(toy: Toy, tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[tuple[int, str, str]] = []
    computed: list[object] = []
    plain, blocks = extract, MergedTensors.blocks

    def counted(encoder: torch.nn.Module, family: Any, pooling: str, *rest: Any, **more: Any) -> Any:
        content = hash(tuple(round(float(p.detach().sum()), 5) for p in encoder.parameters()))
        calls.append((content, more["task"], rest[0].split))
        return plain(encoder, family, pooling, *rest, **more)

    def counted_blocks(tensors: MergedTensors) -> Any:
        computed.append(tensors)
        return blocks(tensors)

    monkeypatch.setattr(encoding, "extract", counted)
    monkeypatch.setattr(MergedTensors, "blocks", counted_blocks)
    how = replace(toy.encoding, cache=FeatureCache(tmp_path))
    subjects = [toy.alone(), toy.average(), toy.total()]
    first = toy.scored(subjects, PROTOCOLS, how=how)
    assert len(calls) == len(set(calls)) == (2 + 2 + 2) * 2  # encoders and tasks; train and test
    assert {split for *_, split in calls} == {"train", "test"}
    assert computed.count(subjects[1].models["where"].weights) == 1
    calls.clear()
    again = toy.scored(subjects, PROTOCOLS, how=how)
    assert not calls
    assert [item.record for item in again] == [item.record for item in first]


def test_what_cannot_be_scored(toy: Toy) -> None:
    one, train = [toy.average()], toy.without_labels("train")
    aligned, knn = PROTOCOLS[2], PROTOCOLS[1]
    turned = {**toy.tasks, "where": replace(toy.tasks["where"], labels=("bottom", "middle", "top"))}
    strange = Subject("average", {"wher": toy.average().models["where"]})
    teachers = {"bright": toy.experts.teacher("bright")}
    cases: list[tuple[str, list[Subject], list[EvaluationProtocol], dict[str, Any]]] = [
        (r"expert of 'where' is needed as teacher; .*--expert where=PATH", one, [aligned], {"teachers": teachers}),
        ("test split of 'bright' has no labels", one, [CURRENT], {"tasks": toy.without_labels("test")}),
        ("2 shots per class need labelled inputs; give", one, [replace(aligned, shots=2)], {"tasks": train}),
        ("'knn' needs labels", one, [replace(knn, shots=0.5)], {"tasks": train}),
        ("2 models are called 'average'", [*one, *one], [CURRENT], {}),
        (r"there is no data for 'wher'; did you mean 'where'\?", [strange], [CURRENT], {}),
        ("class 0 has 15 examples, fewer than 40 shots", one, [replace(knn, shots=40)], {}),
    ]
    for message, subjects, protocols, more in cases:
        with pytest.raises(RecipeError, match=message):
            toy.scored(subjects, protocols, **more)
    with pytest.raises(IncompatibleError, match=r"must have the labels of its head in 'average', .*match_labels"):
        toy.scored(one, tasks=turned)
    unlabelled, labelled = toy.scored(one, [aligned], tasks=train), toy.scored(one, [aligned])
    assert [item.record for item in unlabelled] == [item.record for item in labelled]  # aligned-c never saw a label


def test_an_expert_that_knows_the_test_inputs(toy: Toy) -> None:
    assert contamination_notes(toy.encoded()) == []
    # The expert is as good as ever on test; of the validation labels all are made wrong.
    (note,) = contamination_notes(toy.encoded(tasks=toy.with_wrong_labels("where", "val")))
    assert note.startswith("the expert of 'where' scores ")
    assert note.endswith("it may have been trained on the test inputs")
    task = toy.tasks["where"]
    without = {name: part for name, part in task.splits.items() if name != "val"}
    nothing = Examples([], np.zeros(0, dtype=np.int64), "val")
    for splits in (without, {**task.splits, "val": task["val"].unlabelled()}, {**task.splits, "val": nothing}):
        tasks = {**toy.tasks, "where": replace(task, splits=splits)}
        assert contamination_notes(toy.encoded(tasks=tasks)) == []
    assert contamination_notes(toy.encoded(teachers={})) == []


def test_inputs_that_two_splits_share(toy: Toy) -> None:
    task, test = toy.tasks["where"], toy.tasks["where"]["test"]
    mixed = replace(test, inputs=[*(list(task["train"].inputs)[:2]), *list(test.inputs)[2:]])
    tasks = {**toy.tasks, "where": task_with(task, "test", mixed)}
    (note,) = contamination_notes(toy.encoded(tasks=tasks, teachers={}))
    assert note == (
        f"2 of {len(test)} test inputs of 'where' are among those for training or validation: models may have been "
        "fitted to them; take them out of one split"
    )


@dataclass(frozen=True)
class Spy(EvaluationProtocol):
    """A protocol that keeps the evidence that it gets."""

    wanted: frozenset[Need] = frozenset()
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def needs(self) -> frozenset[Need]:
        return self.wanted

    def builder(self) -> Any:
        return self

    def build(self, evidence: Evidence) -> Classifier:
        self.evidence.append(evidence)
        return evidence.head


ACCESS: dict[str, Split] = {"inductive": "train", "transductive": "test"}
NEEDS = ("", "features", "features labels", "features expert", "features expert labels")


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("shots", [None, 0.5, 2])
@pytest.mark.parametrize("words", NEEDS)
def test_evidence_is_what_was_declared(toy: Toy, words: str, access: Any, shots: float | None) -> None:
    needs: Any = frozenset(words.split())
    tasks, model, task = toy.encoded(), toy.average().models["where"], "where"
    own = model.with_heads({**model.heads, task: replace(head_of(model.head(task)), normalise=True)})
    protocol = Spy(shots=shots, seeds=2, access=access, wanted=needs)
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
    for answer, evidence in zip(results, protocol.evidence, strict=True):
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
        shown = evidence.support.labels
        assert (None if shown is None else shown.tolist()) == (labels[rows].tolist() if "labels" in needs else None)
        assert (evidence.expert is not None) == ("expert" in needs)
        if evidence.expert is not None:
            assert evidence.expert.labels is None
            assert evidence.expert.values.equal(tasks.features(teacher, task, split).values[rows])
        # What was shown with its label is not scored, and all else is.
        left_out = sorted(rows) if "labels" in needs and access == "transductive" else []
        assert (answer.predicted == UNSCORED).nonzero().flatten().tolist() == left_out


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
            aligner: Any = make_aligner(name, dict(protocol.options))
            if hasattr(aligner, "seed"):
                aligner = replace(aligner, seed=seed)
            classifier = aligner.fit(FeaturePair(merged.unlabelled(), own.unlabelled()), head).classifier
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
    subject = toy.average()
    for task, model in subject.models.items():
        results = list(answers(protocol, toy.encoded(), model, task))
        assert [answer.seed for answer in results] == ([0, 1] if protocol.needs else [0])
        expected_draws = by_hand(protocol, toy.encoded(), model, task, split)
        for answer, (predicted, rows) in zip(results, expected_draws, strict=False):
            if access == "transductive" and "labels" in protocol.needs:
                predicted[rows] = UNSCORED
            assert answer.predicted.equal(predicted)
            assert (answer.extra > 0) == (protocol.aligner == "surgery" or protocol.name == "knn")
        # Inputs of the other splits make no difference, nor do other draws.
        used = {name: part for name, part in toy.tasks[task].splits.items() if name in (split, "test")}
        alone = toy.encoded(tasks={task: replace(toy.tasks[task], splits=used)})
        (later,) = answers(replace(protocol, first=1, seeds=1), alone, model, task)
        assert later.predicted.equal(results[-1].predicted)
    for item in toy.scored([subject], [protocol])[: 2 if protocol.needs else 1]:
        record = item.record
        assert (record.protocol, record.aligner, record.options) == (case.name, case.aligner, case.options)
        expected = (3, split, access) if protocol.needs else (None, None, "data-free")
        assert (record.shots, record.support, record.access) == expected


def test_a_model_that_is_more_than_a_head_is_scored_as_it_is(toy: Toy) -> None:
    """Only what needs evidence sees the head behind it."""
    from orthomerge.models.heads import SurgeryHead

    model, tasks = toy.average().models["where"], toy.encoded()
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
    models = {task: toy.average().models[task] for task in reversed(toy.tasks)}
    assert models["where"].encoder is not models["bright"].encoder
    mtl = Subject("mtl", {task: model.with_heads({task: model.head(task)}) for task, model in models.items()})
    scores = toy.scored([mtl, toy.average()])
    for task in toy.tasks:
        (item,) = only(scores, method="mtl", protocol="joint", task=task)
        (same,) = only(scores, method="average", protocol="joint", task=task)
        assert same_predictions(item, same)  # in one label space, whatever the order of the tasks
        assert (item.predictions.truth == same.predictions.truth).all()


def test_joint_with_heads_that_read_the_encoder_in_different_ways(toy: Toy) -> None:
    """Every head reads every input in its own way."""
    model = toy.average().models["where"]
    heads = {"bright": replace(head_of(model.heads["bright"]), pooling="mean"), "where": model.heads["where"]}
    mixed, tasks = model.with_heads(heads), toy.encoded()
    joint = only(list(evaluate([Subject.of(mixed, toy.tasks)], [CURRENT], tasks)), protocol="joint")
    for item in joint:
        task = item.record.task
        parts = [head(tasks.features(mixed, task, "test", reader=head_of(head)).values) for head in heads.values()]
        assert item.predictions.predicted.tolist() == torch.cat(parts, 1).argmax(1).tolist()
    (plain,) = only(toy.scored([toy.average()]), protocol="joint", task="bright")
    (other,) = only(joint, task="bright")
    assert not same_predictions(plain, other)
