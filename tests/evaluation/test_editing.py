"""Scales, forgetting and analogies: by hand on two weights, and the same as real merges on a small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.analysis.making import Toy, task_with

from orthomerge import Model, analogy, merge, negate
from orthomerge.api.open import open as open_experts
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import Progress
from orthomerge.core.schema import maker_of, schema
from orthomerge.data.task import Examples, Split, Task
from orthomerge.evaluation import editing
from orthomerge.evaluation.editing import AnalogyPoint, Form, NegationPoint, base_heads, search_analogy, search_negation
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import counted, predict, wilson
from orthomerge.evaluation.scale import GRID, ScaleSearch, Span, arithmetic, scales, search_scale, span_of
from orthomerge.merging.methods import METHODS
from orthomerge.models.families import generic
from orthomerge.models.features import Features
from orthomerge.models.heads import Head, Linear
from orthomerge.models.model_data import Encoder, Origin, loaded
from orthomerge.models.tensors import MemoryTensors


class Pairs(EncodedTasks):
    """Features are the two numbers of an input, each times a weight."""

    def features(self, model: Any, task: str, split: Split, *, reader: Head | None = None) -> Features:
        examples = self.tasks[task][split]
        values = torch.tensor(np.stack(list(examples.inputs)), dtype=torch.float32)
        return Features.of(values * model.weights.tensors["weight"], examples, task)


def span_by_hand(origin: Sequence[float], *directions: Sequence[float]) -> Span:
    """A span of models of two weights."""
    start, *changes = ({"weight": torch.tensor(values, dtype=torch.float32)} for values in (origin, *directions))
    encoder = Encoder(generic(""), {}, MemoryTensors(start))
    model = Model(encoder, {}, cast("Any", None), Origin({"method": {"name": "by hand"}}))
    return Span(model, start, tuple(changes))


def pairs_of(*tasks: Task, said: Said | None = None) -> EncodedTasks:
    return Pairs({task.name: task for task in tasks}, progress=said or Said())


def task_of(name: str, splits: Mapping[Split, tuple[Sequence[Sequence[float]], Sequence[int]]]) -> Task:
    """A task of two classes whose inputs are pairs of numbers."""
    examples: dict[str, Examples] = {
        split: Examples([np.array(pair) for pair in inputs], np.array(labels, dtype=np.int64), split)
        for split, (inputs, labels) in splits.items()
    }
    return Task(name, ("no", "yes"), "image", examples)


def threshold(*weights: float) -> Head:
    """Says yes where the weighted features are above 0.5."""
    return Head(Linear(torch.tensor([[0.0, 0.0], list(weights)]), torch.tensor([0.5, 0.0])), ("no", "yes"))


def half(place: int, yes: Sequence[float]) -> tuple[list[list[float]], list[int]]:
    """As many zeros, which are no, as there are numbers that are yes, at one place of the pair."""
    pairs = [[0.0, 0.0] for _ in range(2 * len(yes))]
    for pair, value in zip(pairs[len(yes) :], yes, strict=True):
        pair[place] = value
    return pairs, [0] * len(yes) + [1] * len(yes)


TARGET = task_of("target", {"val": half(0, [0.6, 0.7, 0.8, 1.0]), "test": half(0, [0.9, 0.9, 0.7, 1.0])})
CONTROL = task_of("control", {"val": half(1, [0.6, 0.65, *[1.0] * 8]), "test": half(1, [0.6, 0.6, 0.6, 1.0])})
HEADS = {"target": threshold(1, 0), "control": threshold(0, 1)}
LINE = ((1, 1), (-1, -0.5))


def negated(span: Span, *tasks: Task, heads: Any = HEADS, said: Said | None = None, **more: Any) -> editing.Negation:
    given = pairs_of(*(tasks or (TARGET, CONTROL)), said=said)
    return search_negation(span, heads, given, target="target", **{"grid": (0.2, 0.4, 0.6, 0.8), **more})


def test_negation_by_hand() -> None:
    # Weights (1 - s, 1 - s / 2). At 0.4 the target's 0.6, 0.7 and 0.8 fall to 0.48 and less, below the head's 0.5, and
    # of the control's twenty only the 0.6 does: 95 %. At 0.6 its 0.65 falls too.
    said = Said()
    found = negated(span_by_hand(*LINE), said=said, title="minus target")
    right = {0.0: (8, 20), 0.2: (7, 20), 0.4: (5, 19), 0.6: (4, 18), 0.8: (4, 18)}
    assert found.curve == tuple(NegationPoint(scale, one / 8, other / 20) for scale, (one, other) in right.items())
    assert found.scale == 0.4
    assert said.stages[2] == "minus target: scale 0.4: target 62.5, control 95.0"
    # On test inputs at 0.4: of the target only the 0.7 falls (to 0.42), of the control three 0.6 of eight inputs do.
    assert (found.base["target"].value, found.edited["target"].value) == (1.0, 7 / 8)
    assert (found.edited["target"].low, found.edited["target"].high) == wilson(7, 8)
    assert found.edited["control"].value == found.kept == 5 / 8
    assert found.controls == ("control",)


@pytest.mark.parametrize(
    ("line", "keep", "scale"),
    [(LINE, 1.0, 0.2), (LINE, 0.95, 0.4), (LINE, 0.9, 0.6), (LINE, 0.1, 0.6), (((1, 1), (1, 0)), 0.95, 0.0)],
)
def test_how_much_to_keep_and_the_smaller_of_equals(line: Any, keep: float, scale: float) -> None:
    assert negated(span_by_hand(*line), keep=keep).scale == scale


def test_no_scale_keeps_the_control_and_several_are_one() -> None:
    found = negated(span_by_hand((1, 1), (-1, -10)))
    assert (found.scale, found.edited, found.kept) == (0.0, found.base, 1.0)
    assert min(point.target for point in found.curve) == 0.5  # it was there to be had
    # One control falls to 18 of 20 and another stays whole: 95 % in the mean.
    other = task_of("other", {"val": half(1, [1.0] * 10), "test": half(1, [1.0] * 4)})
    found = negated(span_by_hand(*LINE), TARGET, CONTROL, other, heads={**HEADS, "other": threshold(0, 1)})
    assert found.curve[3].control == pytest.approx(0.95)
    assert found.scale == 0.6
    assert found.controls == ("control", "other")
    assert found.kept == pytest.approx((5 / 8 + 1) / 2)


def test_what_cannot_be_negated(toy: Toy) -> None:
    blind = [task_with(CONTROL, split, CONTROL[split].unlabelled()) for split in CONTROL.splits]
    cases: list[tuple[str, Sequence[Task], dict[str, Any]]] = [
        *((rf"control to keep must be in \(0, 1\], got {keep}", (), {"keep": keep}) for keep in (0.0, 1.1)),
        *(("head of the target 'target' and of a control", (), {"heads": {name: HEADS[name]}}) for name in HEADS),
        ("val split of 'control' has no labels", (TARGET, blind[0]), {}),
        ("test split of 'control' has no labels", (TARGET, blind[1]), {}),
        ("there is no data for 'control'", (TARGET,), {}),
    ]
    for message, tasks, more in cases:
        with pytest.raises(RecipeError, match=message):
            negated(span_by_hand(*LINE), *tasks, **more)
    blunt = r"predict the control 'control' better.*got .* 50\.0% against 50\.0%.*; choose"
    with pytest.raises(RecipeError, match=blunt):
        negated(span_by_hand((1, 0), (-1, 0)))
    with pytest.raises(RecipeError, match="unknown heads 'prob'; did you mean 'probe'"):
        negate(toy.experts, "bright", toy.tasks, heads="prob")  # type: ignore[arg-type]


def accuracy(head: Any, values: torch.Tensor, labels: Any) -> float:
    return counted(predict(head, values), torch.as_tensor(labels)).value


def test_negation_is_that_of_real_merges(toy: Toy) -> None:
    result = negate(toy.experts, "bright", toy.tasks, grid=(0.3, 1.0), keep=0.6, encoding=toy.encoding)
    found, tasks = result.search, toy.encoded()
    base = span_of(arithmetic(toy.experts, {}))
    heads = base_heads(base, tasks, toy.experts.heads)

    def measured(scale: float, task: str, split: Split) -> float:
        model = arithmetic(toy.experts, {"bright": 0.0 - scale})
        return accuracy(heads[task], tasks.features(model, task, split).values, toy.tasks[task][split].labels)

    for point in found.curve:
        assert point.target == pytest.approx(measured(point.scale, "bright", "val"))
        assert point.control == pytest.approx(measured(point.scale, "where", "val"))
    assert found.scale > 0
    for task, score in found.edited.items():
        assert score.value == pytest.approx(measured(found.scale, task, "test"))
        assert found.base[task].value == pytest.approx(measured(0.0, task, "test"))
    assert result.model is not None
    assert result.model.digest == arithmetic(toy.experts, {"bright": -found.scale}, dtype="keep").digest
    assert [point.scale for point in result.random.curve] == [0.0, 0.3, 1.0]
    assert result.random.curve[0] == found.curve[0]
    assert result.random.curve[1:] != found.curve[1:]
    nothing = negate(toy.experts, "bright", toy.tasks, grid=(300,), keep=1.0, encoding=toy.encoding)
    assert (nothing.search.scale, nothing.model) == (0, None)


def test_heads_of_the_base_are_probes_on_its_train_features(toy: Toy) -> None:
    tasks = toy.encoded()
    span = span_of(arithmetic(toy.experts, {}))
    reader = {"where": replace(toy.experts.heads["where"], pooling="mean")}
    head = base_heads(span, tasks, reader)["where"]
    assert (head.labels, head.pooling) == (toy.tasks["where"].labels, "mean")
    train = tasks.features(toy.experts.base, "where", "train", reader=head)
    assert accuracy(head, train.values, train.labels) > 0.9
    with pytest.raises(RecipeError, match="train split of 'where' has no labels"):
        base_heads(span, toy.encoded(tasks=toy.without_labels("train")), reader)


def test_heads_of_the_experts(toy: Toy) -> None:
    """A probe needs no expert of its task, an expert's head does."""
    found = negate(toy.experts, "bright", toy.tasks, heads="expert", grid=(0.3,), encoding=toy.encoding).search
    base = toy.experts.base.with_heads(toy.experts.heads)
    wanted = {task: toy.encoded().score(base, task, "test").value for task in ("bright", "where")}
    assert {task: score.value for task, score in found.base.items()} == wanted
    more = {**toy.tasks, "other": toy.tasks["where"]}
    found = negate(toy.experts, "bright", more, grid=(0.3,), keep=0.1, encoding=toy.encoding).search
    assert found.controls == ("where", "other")
    assert found.base["other"] == found.base["where"]


# `no` as long as the first weight is at most 0.5, `yes` as soon as the second is more.
NO, YES = [1.0, 0.0], [0.0, 1.0]
FOURTH = task_of("d", {"val": ([NO, YES], [0, 1]), "test": ([NO, NO, NO, YES], [0, 0, 0, 1])})


def solved(task: Task = FOURTH, *, said: Said | None = None, **more: Any) -> editing.Analogy:
    """Weights (scale, shift)."""
    plane, given = span_by_hand((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), pairs_of(task, said=said)
    return search_analogy(plane, threshold(1, 1), given, task="d", **{"grid": (0.25, 0.75, 1.0), **more})


def test_analogy_by_hand() -> None:
    said = Said()
    found = solved(said=said, title="a:b::c")
    # One half is right on either side of 0.5, so the base is as good as anything.
    assert found.curve == tuple(AnalogyPoint(scale, scale, 0.5) for scale in (0.0, 0.25, 0.75, 1.0))
    assert found.best == AnalogyPoint(0.0, 0.0, 0.5)
    assert said.stages[2] == "a:b::c: scale 0.75, shift 0.75: 50.0"
    assert (found.base.value, found.auxiliary.value, found.unscaled.value) == (0.75, 0.0, 0.25)
    assert found.edited == found.base
    assert (found.base.low, found.base.high) == wilson(3, 4)
    assert found.expert is None
    # With two coefficients
    found = solved(independent=True)
    assert len(found.curve) == 16
    perfect = {(point.scale, point.shift) for point in found.curve if point.accuracy == 1.0}
    assert perfect == {(0.0, 0.75), (0.0, 1.0), (0.25, 0.75), (0.25, 1.0)}
    assert (found.best.scale, found.best.shift) == (0.0, 0.75)
    assert (found.edited.value, found.unscaled.value) == (1.0, 0.25)


def test_forms_and_their_coefficients() -> None:
    assert Form.parse("king:queen::man") == Form("king", "queen", "man")
    assert Form.parse(" a : b :: c ") == Form("a", "b", "c")
    for wrong in ("", "a:b", "a:b:c", "a::b", "a:b::", ":b::c", "a:b::c:d", "a:b::c::d"):
        with pytest.raises(RecipeError, match=r"an analogy must be a:b::c .*, got"):
            Form.parse(wrong)
    assert Form("a", "b", "c").coefficients(0.5, 0.2) == {"a": -0.2, "b": 0.2, "c": 0.5}
    assert Form("a", "b", "a").coefficients(0.5, 0.2) == pytest.approx({"a": 0.3, "b": 0.2})


def test_analogy_is_that_of_real_merges(toy: Toy) -> None:
    form, tasks = Form("bright", "where", "bright"), toy.encoded(tasks={"fourth": toy.tasks["bright"]})
    places = {**{task: toy.folder / task for task in toy.tasks}, "fourth": toy.folder / "bright"}
    experts, options = open_experts(places, base=toy.folder / "base"), {"independent": True, "encoding": toy.encoding}
    result = analogy(experts, form, "fourth", toy.tasks["bright"], grid=(0.4, 1.0), **options)  # type: ignore[arg-type]
    found, head = result.search, experts.heads["bright"]

    def measured(scale: float, shift: float, split: Split) -> float:
        model = arithmetic(experts, form.coefficients(scale, shift))
        return accuracy(head, tasks.features(model, "fourth", split).values, toy.tasks["bright"][split].labels)

    assert len(found.curve) == 9
    for point in found.curve:
        assert point.accuracy == pytest.approx(measured(point.scale, point.shift, "val"))
    assert found.edited.value == pytest.approx(measured(found.best.scale, found.best.shift, "test"))
    assert found.base.value == pytest.approx(measured(0.0, 0.0, "test"))
    assert found.expert is not None
    assert found.auxiliary == found.expert  # fine-tuned on C is C's expert, which here is the task's own
    assert result.model is not None
    assert result.model.tasks == ("bright", "where", "fourth")


def test_what_is_no_analogy(toy: Toy) -> None:
    for split in FOURTH.splits:
        with pytest.raises(RecipeError, match=f"{split} split of 'd' has no labels"):
            solved(task_with(FOURTH, split, FOURTH[split].unlabelled()))
    with pytest.raises(RecipeError, match="'where' is one of the three of the analogy; give it a new name"):
        analogy(toy.experts, "bright:where::bright", "where", toy.tasks["where"])


class Said(Progress):
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, title: str, total: int | None) -> None:
        self.stages.append(title)


def predictions(toy: Toy, model: Model, task: str) -> torch.Tensor:
    return predict(model.head(task), toy.encoded().features(model, task, "val").values)


@pytest.mark.parametrize(("method", "options"), [("task_arithmetic", {}), ("ties", {"density": 0.05})])
@pytest.mark.parametrize("criterion", ["accuracy", "agreement"])
def test_the_curve_is_that_of_real_merges(toy: Toy, method: str, options: Any, criterion: Any) -> None:
    grid, said = (0.2, 0.7, 1.3), Said()
    how: dict[str, Any] = {"criterion": criterion, "encoding": toy.encoding, "progress": said}
    found = search_scale(toy.experts, method, toy.tasks, {"scale": "auto", **options}, grid=grid, **how)
    assert tuple(found.curve) == grid
    assert [line.partition(":")[0] for line in said.stages] == [f"scale {scale:g}" for scale in grid]
    for scale in grid:
        model = merge(toy.experts, method=method, scale=scale, **options)
        for task in toy.tasks:
            mine, expert = (predictions(toy, each, task) for each in (model, toy.experts.teacher(task)))
            truth = torch.tensor(toy.tasks[task]["val"].labels)
            own, best, agreed = (
                float(same.double().mean()) for same in (mine == truth, expert == truth, mine == expert)
            )
            expected = agreed if criterion == "agreement" else own / best
            assert found.curve[scale][task] == pytest.approx(100 * expected, abs=1e-4)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if "scale" in schema(maker_of(row))])
def test_every_method_with_a_scale_multiplies_its_vector_by_it(toy: Toy, method: str) -> None:
    none, half, whole = (
        merge(toy.experts, method=method, scale=scale).encoder.module().state_dict() for scale in (0.0, 0.5, 1.0)
    )
    for key, tensor in half.items():
        torch.testing.assert_close(tensor, (none[key] + whole[key]) / 2, atol=2e-6, rtol=1e-5)


def test_the_best_scale_and_the_smaller_of_equals() -> None:
    curve = {1.0: {"a": 90.0, "b": 50.0}, 0.3: {"a": 60.0, "b": 80.0}, 0.1: {"a": 10.0, "b": 20.0}}
    found = ScaleSearch("accuracy", curve)
    assert found.means == {1.0: 70.0, 0.3: 70.0, 0.1: 15.0}
    assert found.best == 0.3
    assert (GRID[0], GRID[-1], len(GRID)) == (0.05, 1.0, 20)


def test_agreement_needs_no_labels(toy: Toy) -> None:
    blind = toy.without_labels("val")
    options: dict[str, Any] = {"grid": (0.2, 0.8), "encoding": toy.encoding}
    found = search_scale(toy.experts, "task_arithmetic", blind, **options)
    assert found.criterion == "agreement"  # accuracy where there are labels
    assert found == search_scale(toy.experts, "task_arithmetic", toy.tasks, criterion="agreement", **options)
    assert search_scale(toy.experts, "task_arithmetic", toy.tasks, **options).criterion == "accuracy"
    with pytest.raises(RecipeError, match="val split of 'bright' has no labels; accuracy needs them"):
        search_scale(toy.experts, "task_arithmetic", blind, criterion="accuracy", **options)


def test_mistakes(toy: Toy) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("average", toy.tasks, "'average' has no 'scale' to search"),
        ("ties", {"wher": toy.tasks["where"]}, "data of 'wher', but no task of that name; did you mean 'where'"),
    ]
    for method, data, message in cases:
        with pytest.raises(RecipeError, match=message):
            search_scale(toy.experts, method, data, grid=(1,))


@pytest.fixture(scope="module")
def plane(toy: Toy) -> Span:
    return span_of(arithmetic(toy.experts, {}), *(arithmetic(toy.experts, {task: 1.0}) for task in toy.tasks))


def test_every_point_is_a_merge(toy: Toy, plane: Span) -> None:
    for bright, where in ((0.0, 0.0), (0.3, -0.7), (1.0, 1.0)):
        merged = arithmetic(toy.experts, {"bright": bright, "where": where}).encoder.module().state_dict()
        moved = plane.at(bright, where).encoder.module().state_dict()
        assert moved.keys() == merged.keys()
        for key, tensor in moved.items():
            torch.testing.assert_close(tensor, merged[key], atol=2e-6, rtol=1e-5)


def test_features_of_a_point_are_those_of_the_merge(toy: Toy, plane: Span) -> None:
    """Each head reads the encoder in its own way."""
    head = replace(toy.experts.heads["bright"], pooling="mean")
    model = arithmetic(toy.experts, {"bright": 0.5}).with_heads({"bright": head})
    tasks, point = toy.encoded(), plane.at(0.5, 0.0)
    moved = tasks.features(point, "bright", "test", reader=head)
    torch.testing.assert_close(moved.values, tasks.features(model, "bright", "test").values)
    usual = tasks.features(point.with_heads(toy.experts.heads), "bright", "test")
    assert not torch.allclose(moved.values, usual.values, atol=1e-2)


def test_a_span_moves_no_module_that_others_use(toy: Toy) -> None:
    model = merge(toy.experts, method="average")
    before = {key: tensor.clone() for key, tensor in loaded(model.encoder).module.state_dict().items()}
    toy.encoded().features(span_of(arithmetic(toy.experts, {}), model).at(0.3).with_heads(model.heads), "where", "val")
    assert all(tensor.equal(before[key]) for key, tensor in loaded(model.encoder).module.state_dict().items())


def test_random_directions_are_as_long_and_point_elsewhere(plane: Span) -> None:
    drawn, again, other = (plane.random(seed=seed) for seed in (0, 0, 1))
    for number, direction in enumerate(plane.directions):
        for key, tensor in direction.items():
            found = drawn.directions[number][key]
            torch.testing.assert_close(found.norm(), tensor.norm())
            assert found.equal(again.directions[number][key])
            assert not found.equal(other.directions[number][key])
            if tensor.numel() > 200:
                assert torch.cosine_similarity(found.flatten(), tensor.flatten(), dim=0).abs() < 0.25
    assert drawn.start is plane.start


def test_a_sum_of_task_vectors(toy: Toy) -> None:
    model = arithmetic(toy.experts, {"where": -0.5})
    assert model.origin.facts["method"] == {"name": "task_arithmetic", "parameters": {"scale": [0.0, -0.5]}}
    assert model.tasks == tuple(toy.tasks)
    with pytest.raises(RecipeError, match=r"task vector of 'brigth' needs its expert.*did you mean 'bright'"):
        arithmetic(toy.experts, {"brigth": 1.0})


def test_a_grid() -> None:
    assert scales((1, 0.2, 0.2)) == (0.0, 0.2, 1.0)
    with pytest.raises(RecipeError, match="needs at least one scale"):
        scales(())
    for wrong in (0, -0.1, float("nan"), float("inf"), True, "x"):
        with pytest.raises(RecipeError, match=r"a grid must hold positive numbers, got .*; leave 0 out"):
            scales((0.5, wrong))  # type: ignore[arg-type]
