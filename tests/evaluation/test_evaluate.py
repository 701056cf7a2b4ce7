"""Scores of a tiny benchmark: two tasks of three classes, experts whose heads are solved and not trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.analysis.making import COUNTS, PROCESSOR, Toy
from tests.evaluation.making import (
    CHEAP,
    CURRENT,
    PROTOCOLS,
    average,
    encoded,
    experts,
    only,
    same_predictions,
    scored,
    total,
    with_wrong_labels,
    without_labels,
)

from orthomerge.api.export import export
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.data.task import Examples
from orthomerge.evaluation.evaluate import Subject, contamination_notes
from orthomerge.evaluation.protocols import EvaluationProtocol
from orthomerge.evaluation.tables import lines
from orthomerge.merging.merge import MergedTensors
from orthomerge.models import encoding
from orthomerge.models.encoding import extract
from orthomerge.models.features import FeatureCache
from orthomerge.models.skeleton import quiet

ALIGNED = EvaluationProtocol("aligned-c", CHEAP)


def stock_predictions(folder: Path, examples: Examples) -> list[int]:
    with quiet(), torch.no_grad():
        from transformers import AutoModelForImageClassification

        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        logits: torch.Tensor = model(**PROCESSOR(examples.inputs)).logits
        return logits.argmax(1).tolist()


def test_every_test_example_is_counted_and_a_record_says_how(toy: Toy) -> None:
    merged = total(toy)
    scores = scored(toy, [experts(toy), merged], PROTOCOLS)
    assert len(scores) == 2 * 2 * (1 + 2 + 2 + 1 + 1 + 1 + 1) + 2
    for item in scores:
        record, answers = item.record, item.predictions
        start = 3 if (record.protocol, record.task) == ("joint", "where") else 0
        assert answers.truth.tolist() == (encoded(toy).labels(record.task, "test") + start).tolist()
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
    subject = average(toy)
    subject.models["where"].save(tmp_path / "out")
    scores = scored(toy, [experts(toy), subject])
    for task in toy.tasks:
        test = toy.tasks[task]["test"]
        (expert,) = only(scores, method="expert", task=task)
        assert expert.predictions.predicted.tolist() == stock_predictions(toy.folder / task, test)
        export(tmp_path / "out", tmp_path / task, task=task)
        (merged,) = only(scores, method="average", task=task, protocol="current")
        assert merged.predictions.predicted.tolist() == stock_predictions(tmp_path / task, test)
    best, lost = (
        np.mean([item.record.value for item in only(scores, method=name, protocol="current")])
        for name in ("expert", "average")
    )
    assert best > 0.8 > lost  # something is lost by merging, or these tests see nothing


def test_what_a_model_has_seen_stays_with_it(toy: Toy) -> None:
    protocols = [ALIGNED, replace(ALIGNED, options={"epochs": 3}), replace(ALIGNED, access="transductive")]
    rows = lines(item.record for item in scored(toy, [average(toy, access="transductive")], protocols))
    assert {line.way.access for line in rows} == {"transductive"}
    titles = ("epochs=2, from train", "epochs=3, from train", "epochs=2")
    assert [line.way.title for line in rows] == [*(f"aligned-c, {title}" for title in titles), "joint"]


def test_the_same_protocol_twice(toy: Toy) -> None:
    plain = replace(ALIGNED, access="transductive", models=("average",))
    twice = [plain, replace(plain, seeds=3, support="val")]  # this access takes its support from test anyway
    with pytest.raises(RecipeError, match=r"two protocols score 'average' in the same way: aligned-c, epochs=2 .trans"):
        scored(toy, [average(toy)], twice)
    apart = [plain, replace(twice[1], models=("task_arithmetic",))]
    assert len(only(scored(toy, [average(toy)], apart), protocol="aligned-c")) == len(toy.tasks)
    with pytest.raises(RecipeError, match="score 'task_arithmetic' in the same way: current"):
        scored(toy, [total(toy)], [CURRENT, EvaluationProtocol("current", seeds=2)])


def test_the_same_seed_gives_the_same_records_and_another_other_shots(toy: Toy, tmp_path: Path) -> None:
    """Whatever the number of threads, and whether features are kept or computed anew."""
    threads = torch.get_num_threads()
    runs = []
    try:
        for count, cache in ((1, FeatureCache(tmp_path)), (2, None)):
            torch.set_num_threads(count)
            runs.append(scored(toy, [average(toy)], PROTOCOLS[:3], how=replace(toy.encoding, cache=cache)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    one, other = runs
    assert [item.record for item in one] == [item.record for item in other]
    assert all(same_predictions(left, right) for left, right in zip(one, other, strict=True))
    first, second = only(one, protocol="knn", task="where")
    assert not same_predictions(first, second)


def test_every_split_is_encoded_once_and_a_merge_is_computed_once(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, str, str]] = []
    computed: list[object] = []
    plain, blocks = extract, MergedTensors.blocks

    def counted(
        encoder: torch.nn.Module, family: Any, pooling: str, examples: Examples, *rest: Any, **more: Any
    ) -> Any:
        content = hash(tuple(round(float(p.detach().sum()), 5) for p in encoder.parameters()))
        calls.append((content, more["task"], examples.split))
        return plain(encoder, family, pooling, examples, *rest, **more)

    def counted_blocks(tensors: MergedTensors) -> Any:
        computed.append(tensors)
        return blocks(tensors)

    monkeypatch.setattr(encoding, "extract", counted)
    monkeypatch.setattr(MergedTensors, "blocks", counted_blocks)
    how = replace(toy.encoding, cache=FeatureCache(tmp_path))
    subjects = [experts(toy), average(toy), total(toy)]
    first = scored(toy, subjects, PROTOCOLS, how=how)
    assert len(calls) == len(set(calls)) == (2 + 2 + 2) * 2  # encoders and tasks; train and test
    assert {split for *_, split in calls} == {"train", "test"}
    assert computed.count(subjects[1].models["where"].weights) == 1
    calls.clear()
    again = scored(toy, subjects, PROTOCOLS, how=how)
    assert not calls
    assert [item.record for item in again] == [item.record for item in first]


def test_what_cannot_be_scored(toy: Toy) -> None:
    one, train = [average(toy)], without_labels(toy, "train")
    aligned, knn = PROTOCOLS[2], PROTOCOLS[1]
    turned = {**toy.tasks, "where": replace(toy.tasks["where"], labels=("bottom", "middle", "top"))}
    strange = Subject("average", {"wher": average(toy).models["where"]})
    teachers = {"bright": toy.experts.teacher("bright")}
    cases: list[tuple[str, list[Subject], list[EvaluationProtocol], dict[str, Any]]] = [
        (r"expert of 'where' is needed as teacher; .*--expert where=PATH", one, [aligned], {"teachers": teachers}),
        ("test split of 'bright' has no labels", one, [CURRENT], {"tasks": without_labels(toy, "test")}),
        ("2 shots per class need labelled inputs; give", one, [replace(aligned, shots=2)], {"tasks": train}),
        ("'knn' needs labels", one, [replace(knn, shots=0.5)], {"tasks": train}),
        ("2 models are called 'average'", [*one, *one], [CURRENT], {}),
        (r"task 'wher', but there is no data for it; did you mean 'where'\?", [strange], [CURRENT], {}),
        ("class 0 has 15 examples, fewer than 40 shots", one, [replace(knn, shots=40)], {}),
    ]
    for message, subjects, protocols, more in cases:
        with pytest.raises(RecipeError, match=message):
            scored(toy, subjects, protocols, **more)
    with pytest.raises(IncompatibleError, match=r"must have the labels of its head in 'average', .*match_labels"):
        scored(toy, one, tasks=turned)
    unlabelled, labelled = scored(toy, one, [aligned], tasks=train), scored(toy, one, [aligned])
    assert [item.record for item in unlabelled] == [item.record for item in labelled]  # aligned-c never saw a label


def test_an_expert_that_knows_the_test_inputs(toy: Toy) -> None:
    assert contamination_notes(encoded(toy)) == []
    # The expert is as good as ever on test; of the validation labels all are made wrong.
    (note,) = contamination_notes(encoded(toy, tasks=with_wrong_labels(toy, "where", "val")))
    assert note.startswith("the expert of 'where' scores ")
    assert note.endswith("it may have been trained on the test inputs")
    task = toy.tasks["where"]
    without = {name: part for name, part in task.splits.items() if name != "val"}
    nothing = Examples([], np.zeros(0, dtype=np.int64), "val")
    for splits in (without, {**task.splits, "val": task["val"].unlabelled()}, {**task.splits, "val": nothing}):
        tasks = {**toy.tasks, "where": replace(task, splits=splits)}
        assert contamination_notes(encoded(toy, tasks=tasks)) == []
    assert contamination_notes(encoded(toy, teachers={})) == []


def test_inputs_that_two_splits_share(toy: Toy) -> None:
    task, test = toy.tasks["where"], toy.tasks["where"]["test"]
    mixed = replace(test, inputs=[*(list(task["train"].inputs)[:2]), *list(test.inputs)[2:]])
    tasks = {**toy.tasks, "where": replace(task, splits={**task.splits, "test": mixed})}
    (note,) = contamination_notes(encoded(toy, tasks=tasks, teachers={}))
    assert note == (
        f"2 of {len(test)} test inputs of 'where' are among those for training or validation: models may have been "
        "fitted to them; take them out of one split"
    )
