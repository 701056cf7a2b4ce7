"""Measuring a tiny bench: two tasks of three classes, experts whose heads are solved and not trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orthomerge import Recipe, merge
from orthomerge.data.pixels import PixelProcessor
from orthomerge.data.sampling import few_shot
from orthomerge.data.task import Examples, Split, Task
from orthomerge.errors import IncompatibleError, RecipeError
from orthomerge.evaluation import bench as module
from orthomerge.evaluation.evaluate import Bench, Question, Subject, evaluate, truth_of
from orthomerge.evaluation.metrics import UNSCORED
from orthomerge.evaluation.tables import lines
from orthomerge.features.cache import FeatureCache
from orthomerge.features.extract import extract
from orthomerge.merged import export
from orthomerge.models.load import quiet
from orthomerge.recipe import Expert
from orthomerge.records import Record

PROCESSOR = PixelProcessor(size=8, channels=1)
COUNTS: dict[Split, int] = {"train": 45, "val": 32, "test": 37}  # the last batch is never full
LABELS = {"bright": ("dark", "grey", "light"), "where": ("top", "middle", "bottom")}
BATCH = 8
CHEAP: dict[str, Any] = {"epochs": 2}


@dataclass(frozen=True)
class Toy:
    """A base, experts, and outputs of `merge`: `average`, `sum` and one for each expert."""

    folder: Path
    tasks: dict[str, Task]

    def bench(self, cache: Path, **more: Any) -> Bench:
        given: dict[str, Any] = {"teachers": self.experts.models, "device": "cpu", "batch": BATCH, **more}
        return Bench(self.tasks, PROCESSOR, cache=FeatureCache(cache), **given)

    @property
    def experts(self) -> Subject:
        return Subject("expert", {task: self.folder / "out" / task for task in self.tasks})

    def merged(self, name: str, **more: Any) -> Subject:
        return Subject(name, dict.fromkeys(self.tasks, self.folder / "out" / name), **more)

    def recipe(self, method: str, **parameters: Any) -> Recipe:
        experts: dict[str, Expert | str] = {task: str(self.folder / task) for task in self.tasks}
        return Recipe(experts=experts, base=str(self.folder / "base"), method=method, parameters=parameters)


def toy_tasks() -> dict[str, Task]:
    random = np.random.default_rng(0)
    tasks = {}
    for name, labels in LABELS.items():
        splits: dict[str, Examples] = {}
        for split, count in COUNTS.items():
            truth = random.permutation(np.arange(count) % 3)
            images = random.integers(0, 120, (count, 8, 8))
            for place, label in enumerate(truth):
                if name == "bright":
                    images[place] += 60 * label
                else:
                    images[place, 3 * label : 3 * label + 3] += 110
            splits[split] = Examples(list(images.clip(0, 255).astype(np.uint8)), truth.astype(np.int64), split)
        tasks[name] = Task(name, labels, "image", splits)
    return tasks


def make_toy(folder: Path) -> Toy:
    tasks = toy_tasks()
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "initializer_range": 0.2,
    }
    with quiet():
        from transformers import ViTConfig, ViTForImageClassification, ViTModel

        torch.manual_seed(0)
        base = ViTModel(ViTConfig(**sizes), add_pooling_layer=False)
        base.save_pretrained(folder / "base")
        for name, task in tasks.items():
            config = ViTConfig(**sizes, id2label=dict(enumerate(task.labels)))
            expert = ViTForImageClassification(config).eval()
            expert.vit.load_state_dict({key: t + 0.15 * torch.randn_like(t) for key, t in base.state_dict().items()})
            train = task["train"]
            assert train.labels is not None
            with torch.no_grad():
                features = expert.vit(**PROCESSOR(train.inputs)).last_hidden_state[:, 0].double()
                inputs = torch.cat([features, torch.ones(len(train), 1)], 1)
                target = 6.0 * torch.eye(3, dtype=torch.float64)[torch.tensor(train.labels)]
                solved = torch.linalg.solve(inputs.T @ inputs + 0.1 * torch.eye(17), inputs.T @ target).T.float()
                expert.classifier.weight.copy_(solved[:, :-1])
                expert.classifier.bias.copy_(solved[:, -1])
            expert.save_pretrained(folder / name)
    toy = Toy(folder, tasks)
    merge(toy.recipe("average"), out=folder / "out" / "average")
    merge(toy.recipe("task_arithmetic", scale=1.0), out=folder / "out" / "sum")
    for name in tasks:
        merge(Recipe(experts={name: str(folder / name)}, method="average"), out=folder / "out" / name)
    return toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


QUESTIONS = (
    Question("current"),
    Question("knn", shots=2, seeds=2, access="inductive"),
    Question("aligned-c", shots=0.5, seeds=2, access="inductive", options=CHEAP),
    Question("aligned-c", access="inductive", options=CHEAP),
    Question("probe", access="inductive", options={"steps": 5}),
    Question("knn", shots=3, access="transductive"),
    Question("aligned-c", access="transductive", options=CHEAP),
)


def stock_predictions(folder: Path, examples: Examples) -> torch.Tensor:
    with quiet(), torch.no_grad():
        from transformers import AutoModelForImageClassification

        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        logits: torch.Tensor = model(**PROCESSOR(examples.inputs)).logits
        return logits.argmax(1)


def only(found: Sequence[tuple[Record, torch.Tensor]], **wanted: Any) -> list[tuple[Record, torch.Tensor]]:
    return [item for item in found if all(getattr(item[0], key) == value for key, value in wanted.items())]


def test_every_test_example_is_counted(toy: Toy, cache: Path) -> None:
    found = list(evaluate(toy.bench(cache), [toy.experts, toy.merged("average")], QUESTIONS, suite="toy"))
    assert len(found) == 2 * 2 * (1 + 2 + 2 + 1 + 1 + 1 + 1) + 2
    for record, predicted in found:
        truth = toy.tasks[record.task]["test"].labels
        assert truth is not None
        offset = 3 if (record.protocol, record.task) == ("joint", "where") else 0
        kept = predicted != UNSCORED
        # Only labelled support from the test split itself is not scored: 3 shots of 3 classes.
        shown = 9 if (record.protocol, record.access) == ("knn", "transductive") else 0
        assert len(predicted) == COUNTS["test"]
        assert record.examples == int(kept.sum()) == COUNTS["test"] - shown
        right = int((predicted[kept] == torch.tensor(truth + offset)[kept]).sum())
        assert record.value == right / record.examples
        assert record.low <= record.value <= record.high


def test_current_is_what_the_stock_model_says(toy: Toy, cache: Path, tmp_path: Path) -> None:
    found = list(evaluate(toy.bench(cache), [toy.experts, toy.merged("average")], [Question("current")]))
    for task in toy.tasks:
        test = toy.tasks[task]["test"]
        ((_, predicted),) = only(found, method="expert", task=task)
        assert predicted.equal(stock_predictions(toy.folder / task, test))
        export(toy.folder / "out" / "average", task, tmp_path / task)
        ((record, predicted),) = only(found, method="average", task=task, protocol="current")
        expected = stock_predictions(tmp_path / task, test)
        assert predicted.equal(expected)
        assert record.value == float((expected == torch.tensor(test.labels)).double().mean())
    experts, merged = (
        np.mean([r.value for r, _ in only(found, method=m, protocol="current")]) for m in ("expert", "average")
    )
    assert experts > 0.8 > merged  # something is lost by merging, or these tests see nothing


def test_aligned_c_leaves_an_expert_as_it_is(toy: Toy, cache: Path) -> None:
    questions = [Question("current"), Question("aligned-c", access="inductive")]
    found = list(evaluate(toy.bench(cache), [toy.experts], questions))
    for task in toy.tasks:
        (current, _), (aligned, _) = only(found, task=task)
        assert aligned.value == pytest.approx(current.value, abs=1.5 / COUNTS["test"])


def test_knn_by_hand(toy: Toy, cache: Path) -> None:
    bench = toy.bench(cache)
    subject = toy.merged("average")
    ((record, predicted),) = only(list(evaluate(bench, [subject], [QUESTIONS[1]])), task="bright", seed=1)
    train, test = (bench.features(subject.models["bright"], "bright", split) for split in ("train", "test"))
    labels = toy.tasks["bright"]["train"].labels
    assert labels is not None
    anchors = few_shot(labels, 2, seed=1)
    distances = torch.stack(
        [
            torch.cdist(test.values.double(), train.values[[a for a in anchors if labels[a] == c]].double()).mean(1)
            for c in range(3)
        ],
        1,
    )
    assert predicted.equal(distances.argmin(1))
    assert record.extra_parameters == 6 * 16  # the anchors: inference needs them


def test_what_a_record_says(toy: Toy, cache: Path) -> None:
    subject = toy.merged("sum", parameters={"scale": 1.0})
    found = list(evaluate(toy.bench(cache), [subject], QUESTIONS, suite="toy"))
    for record, _ in found:
        assert (record.method, record.suite, record.metric, record.split) == ("sum", "toy", "accuracy", "test")
        assert record.parameters == {"scale": 1.0}
        assert set(record.inputs) == {"model"}
        assert (record.extra_parameters > 0) == (record.protocol == "knn")
        assert record.options == {"aligned-c": CHEAP, "probe": {"steps": 5}}.get(record.protocol, {})
    said = {(r.protocol, r.access, r.support, r.shots, r.seed) for r, _ in found}
    assert said == {
        ("current", "data-free", None, None, 0),
        ("knn", "inductive", "train", 2, 0),
        ("knn", "inductive", "train", 2, 1),
        ("aligned-c", "inductive", "train", 0.5, 0),
        ("aligned-c", "inductive", "train", 0.5, 1),
        ("aligned-c", "inductive", "train", None, 0),
        ("probe", "inductive", "train", None, 0),
        ("knn", "transductive", "test", 3, 0),
        ("aligned-c", "transductive", "test", None, 0),
        ("joint", "data-free", None, None, 0),
    }


def test_what_a_subject_has_seen_stays_with_it(toy: Toy, cache: Path) -> None:
    subject = toy.merged("average", access="transductive")
    found = list(evaluate(toy.bench(cache), [subject], QUESTIONS[:3]))
    assert {record.access for record, _ in found} == {"transductive"}


def test_questions_that_differ_in_options_or_support_alone(toy: Toy, cache: Path) -> None:
    plain = Question("aligned-c", access="inductive", options=CHEAP)
    questions = [plain, replace(plain, options={"epochs": 3}), replace(plain, support="val")]
    found = list(evaluate(toy.bench(cache), [toy.merged("average")], questions))
    said = [(r.options, r.support) for r, _ in only(found, protocol="aligned-c", task="where")]
    assert said == [({"epochs": 2}, "train"), ({"epochs": 3}, "train"), ({"epochs": 2}, "val")]
    titles = [line.title for line in lines(record for record, _ in found)]
    assert titles == ["aligned-c, epochs=2", "aligned-c, epochs=3", "aligned-c, epochs=2, from val", "joint"]


def test_a_subject_that_saw_the_test_inputs_keeps_its_questions_apart(toy: Toy, cache: Path) -> None:
    plain = Question("aligned-c", access="inductive", options=CHEAP)
    questions = [plain, replace(plain, access="transductive")]
    found = list(evaluate(toy.bench(cache), [toy.merged("average", access="transductive")], questions))
    titles = [line.title for line in lines(record for record, _ in found) if line.protocol == "aligned-c"]
    assert titles == [f"aligned-c, epochs=2{more}" for more in (", from train", "")]


def test_the_same_question_twice(toy: Toy, cache: Path) -> None:
    plain = Question("aligned-c", access="transductive", options=CHEAP, subjects=("average",))
    twice = [plain, replace(plain, seeds=3, support="val")]  # this access takes its support from test anyway
    with pytest.raises(RecipeError, match=r"two questions ask 'average' for the same: aligned-c, epochs=2 .transduct"):
        list(evaluate(toy.bench(cache), [toy.merged("average")], twice))
    apart = [plain, replace(twice[1], subjects=("sum",))]
    assert list(evaluate(toy.bench(cache), [toy.merged("average"), toy.merged("sum")], apart))
    with pytest.raises(RecipeError, match="ask 'sum' for the same: current"):
        list(evaluate(toy.bench(cache), [toy.merged("sum")], [Question("current"), Question("current", seeds=2)]))


def test_access_classes_never_share_a_line(toy: Toy, cache: Path) -> None:
    found = [record for record, _ in evaluate(toy.bench(cache), [toy.merged("average")], QUESTIONS)]
    for line in lines(found):
        assert set(line.values) == set(toy.tasks)
    aligned = [line for line in lines(found) if line.protocol == "aligned-c" and line.shots is None]
    assert [line.access for line in aligned] == ["inductive", "transductive"]


def test_the_same_seed_gives_the_same_records(toy: Toy, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    runs = []
    try:
        for number, count in enumerate((1, 1, 2)):
            torch.set_num_threads(count)
            bench = toy.bench(tmp_path / str(number))
            runs.append(list(evaluate(bench, [toy.experts, toy.merged("average")], QUESTIONS[:5])))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert [record for record, _ in run] == [record for record, _ in runs[0]]
        assert all(one.equal(other) for (_, one), (_, other) in zip(run, runs[0], strict=True))


def test_seeds_draw_other_shots(toy: Toy, cache: Path) -> None:
    question = Question("knn", shots=1, seeds=5, access="inductive")
    found = only(list(evaluate(toy.bench(cache), [toy.merged("average")], [question])), protocol="knn", task="where")
    assert [record.seed for record, _ in found] == [0, 1, 2, 3, 4]
    assert len({tuple(predicted.tolist()) for _, predicted in found}) > 1


def test_joint_only_where_one_encoder_serves_all_tasks(toy: Toy, cache: Path) -> None:
    single = Subject("single", {"bright": toy.folder / "out" / "average"})
    subjects = [toy.experts, toy.merged("average"), single]
    found = list(evaluate(toy.bench(cache), subjects, [Question("current")]))
    joint = only(found, protocol="joint")
    assert [(record.method, record.task) for record, _ in joint] == [("average", "bright"), ("average", "where")]
    for record, _ in joint:  # the task unknown cannot be easier than the task known
        ((known, _),) = only(found, method="average", protocol="current", task=record.task)
        assert record.value <= known.value
        assert record.access == "data-free"


def test_joint_goes_by_the_encoder_and_not_by_the_folder(toy: Toy, cache: Path, tmp_path: Path) -> None:
    """Multi-task training gives one encoder in a folder for each task."""
    models = {}
    for task in reversed(toy.tasks):
        export(toy.folder / "out" / "average", task, tmp_path / task)
        config = json.loads((tmp_path / task / "config.json").read_text())
        (tmp_path / task / "config.json").write_text(json.dumps({**config, "orthomerge": {"task": task}}))
        models[task] = tmp_path / "out" / task
        merge(Recipe(experts={task: str(tmp_path / task)}, method="average"), out=models[task])
    mtl = Subject("mtl", models)
    found = list(evaluate(toy.bench(cache), [toy.experts, mtl, toy.merged("average")], [Question("current")]))
    for task in toy.tasks:
        ((record, predicted),) = only(found, method="mtl", protocol="joint", task=task)
        ((_, same),) = only(found, method="average", protocol="joint", task=task)
        assert predicted.equal(same)  # in one label space, though this subject lists its tasks the other way round
        assert record.value == float((predicted == truth_of(toy.bench(cache), mtl, record)).double().mean())
    assert not only(found, method="expert", protocol="joint")


def test_what_should_have_been_predicted(toy: Toy, cache: Path) -> None:
    bench, subject = toy.bench(cache), toy.merged("average")
    labels = {name: torch.tensor(task["test"].labels) for name, task in toy.tasks.items()}
    for record, _ in evaluate(bench, [subject], [Question("current")]):
        first = 3 if (record.protocol, record.task) == ("joint", "where") else 0
        assert truth_of(bench, subject, record).equal(labels[record.task] + first)
    task = toy.tasks["where"]
    unlabelled = replace(task, splits={"test": task["test"].unlabelled()})
    with pytest.raises(RecipeError, match="test split of 'where' has no labels; accuracy needs them"):
        truth_of(replace(bench, tasks={"where": unlabelled}), subject, replace(record, task="where"))


def test_questions_for_some_subjects_only(toy: Toy, cache: Path) -> None:
    questions = [Question("current"), replace(QUESTIONS[1], subjects=("average",))]
    found = list(evaluate(toy.bench(cache), [toy.experts, toy.merged("average")], questions))
    assert {record.method for record, _ in only(found, protocol="knn")} == {"average"}


def test_every_split_is_encoded_once(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, str, str]] = []
    plain = extract

    def counted(
        encoder: torch.nn.Module, family: Any, pooling: str, examples: Examples, *rest: Any, **more: Any
    ) -> Any:
        content = hash(tuple(round(float(p.detach().sum()), 5) for p in encoder.parameters()))
        calls.append((content, more["task"], examples.split))
        return plain(encoder, family, pooling, examples, *rest, **more)

    monkeypatch.setattr(module, "extract", counted)
    subjects = [toy.experts, toy.merged("average"), toy.merged("sum")]
    first = list(evaluate(toy.bench(tmp_path), subjects, QUESTIONS))
    assert len(calls) == len(set(calls)) == (2 + 2 + 2) * 2  # encoders and tasks; train and test
    assert {split for *_, split in calls} == {"train", "test"}
    calls.clear()
    again = list(evaluate(toy.bench(tmp_path), subjects, QUESTIONS))
    assert not calls
    assert [record for record, _ in again] == [record for record, _ in first]


def test_a_teacher_is_needed_and_missing(toy: Toy, cache: Path) -> None:
    bench = toy.bench(cache, teachers={"bright": toy.folder / "out" / "bright"})
    with pytest.raises(RecipeError, match=r"the expert of 'where' is needed as teacher .*--expert where=PATH"):
        list(evaluate(bench, [toy.merged("average")], [QUESTIONS[2]]))
    assert list(evaluate(bench, [toy.merged("average")], QUESTIONS[:2]))


def test_labels_in_another_order(toy: Toy, cache: Path) -> None:
    turned = replace(toy.tasks["where"], labels=("bottom", "middle", "top"))
    bench = Bench({**toy.tasks, "where": turned}, PROCESSOR, cache=FeatureCache(cache), device="cpu")
    with pytest.raises(IncompatibleError, match=r"head of 'where' in .*average has other labels .*match_labels"):
        list(evaluate(bench, [toy.merged("average")], [Question("current")]))


def test_unlabelled_splits(toy: Toy, cache: Path) -> None:
    def without(split: Split) -> Bench:
        tasks = {
            name: replace(task, splits={**task.splits, split: task[split].unlabelled()})
            for name, task in toy.tasks.items()
        }
        return replace(toy.bench(cache), tasks=tasks)

    subjects = [toy.merged("average")]
    with pytest.raises(RecipeError, match="test split of 'bright' has no labels; accuracy needs them"):
        list(evaluate(without("test"), subjects, [Question("current")]))
    with pytest.raises(RecipeError, match="2 shots a class need labels to tell classes"):
        list(evaluate(without("train"), subjects, [replace(QUESTIONS[2], shots=2)]))
    with pytest.raises(RecipeError, match="'knn' needs labels"):
        list(evaluate(without("train"), subjects, [replace(QUESTIONS[1], shots=0.5)]))
    unlabelled = list(evaluate(without("train"), subjects, [QUESTIONS[2]]))
    labelled = list(evaluate(toy.bench(cache), subjects, [QUESTIONS[2]]))
    assert [record for record, _ in unlabelled] == [record for record, _ in labelled]  # aligned-c never saw a label


def test_mistakes(toy: Toy, cache: Path) -> None:
    bench = toy.bench(cache)
    with pytest.raises(RecipeError, match="2 subjects are called 'average'"):
        list(evaluate(bench, [toy.merged("average"), toy.merged("average")], [Question("current")]))
    strange = Subject("average", {"wher": toy.folder / "out" / "average"})
    with pytest.raises(RecipeError, match=r"has task 'wher', but there is no data of it; did you mean 'where'\?"):
        list(evaluate(bench, [strange], [Question("current")]))
    with pytest.raises(RecipeError, match="'seeds' must be at least 1, got 0"):
        Question("knn", seeds=0)
    with pytest.raises(RecipeError, match="did you mean 'current'"):
        list(evaluate(bench, [toy.experts], [Question("curent")]))
    with pytest.raises(RecipeError, match="class 0 has 15 examples, fewer than 40 shots"):
        list(evaluate(bench, [toy.experts], [replace(QUESTIONS[1], shots=40)]))
    with pytest.raises(RecipeError, match="which does not go with 'data-free' access"):
        list(evaluate(bench, [toy.experts], [Question("knn")]))
