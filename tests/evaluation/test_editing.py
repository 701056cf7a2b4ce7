"""Forgetting: worked out by hand on two weights, and the same as real merges on a small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from tests.analysis.making import Toy
from tests.evaluation.making import encoded, without_labels
from tests.evaluation.test_scale import Said

from orthomerge.api.negate import negate
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Modality, Split, Task
from orthomerge.evaluation.editing import Negation, NegationPoint, base_heads, search_negation
from orthomerge.evaluation.encoded import EncodedTasks
from orthomerge.evaluation.metrics import counted, predict, wilson
from orthomerge.evaluation.span import Span, arithmetic, span_of
from orthomerge.files.checkpoint import Spec
from orthomerge.models.encoding import Encoding
from orthomerge.models.families import generic
from orthomerge.models.heads import Head, Linear
from orthomerge.models.skeleton import Skeleton


class Scaled(torch.nn.Module):
    """Features are the two numbers of an input, each times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@dataclass(frozen=True)
class Pairs:
    modality: ClassVar[Modality] = "image"

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(np.stack(list(inputs)), dtype=torch.float32)}

    def digest(self) -> str:
        return "pairs"


def by_hand(origin: Sequence[float], *directions: Sequence[float]) -> Span:
    """A span of models of two weights."""
    skeleton = Skeleton(Scaled(), {"weight": "weight"}, {"weight": Spec((2,), "F32")})
    tensors = [{"weight": torch.tensor(values, dtype=torch.float32)} for values in (origin, *directions)]
    return Span(skeleton, generic(""), tensors[0], tuple(tensors[1:]), processor=cast("Any", None))


def pairs_of(*tasks: Task) -> EncodedTasks:
    return EncodedTasks({task.name: task for task in tasks}, how=Encoding(None, "cpu", processor=Pairs()))


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
GRID = (0.2, 0.4, 0.6, 0.8)


def searched(
    span: Span, *tasks: Task, grid: Sequence[float] = GRID, heads: Mapping[str, Head] = HEADS, **more: Any
) -> Negation:
    return search_negation(span, heads, pairs_of(*(tasks or (TARGET, CONTROL))), target="target", grid=grid, **more)


def test_by_hand() -> None:
    # Weights (1 - s, 1 - s / 2). At 0.4 the target's 0.6, 0.7 and 0.8 fall to 0.48 and less, below the head's 0.5, and
    # of the control's twenty only the 0.6 does: 95 %. At 0.6 its 0.65 falls too.
    said = Said()
    found = searched(by_hand((1, 1), (-1, -0.5)), progress=said, title="minus target")
    assert found.curve == (
        NegationPoint(0.0, 8 / 8, 20 / 20),
        NegationPoint(0.2, 7 / 8, 20 / 20),
        NegationPoint(0.4, 5 / 8, 19 / 20),
        NegationPoint(0.6, 4 / 8, 18 / 20),
        NegationPoint(0.8, 4 / 8, 18 / 20),
    )
    assert found.scale == 0.4
    assert said.stages[2] == "minus target: scale 0.4: target 62.5, control 95.0"
    # On test inputs at 0.4: of the target only the 0.7 falls (to 0.42), of the control three 0.6 of eight inputs do.
    assert (found.base["target"].value, found.edited["target"].value) == (1.0, 7 / 8)
    assert (found.edited["target"].low, found.edited["target"].high) == wilson(7, 8)
    assert found.edited["control"].value == 5 / 8
    assert found.kept == 5 / 8
    assert found.controls == ("control",)


@pytest.mark.parametrize(("keep", "scale"), [(1.0, 0.2), (0.95, 0.4), (0.9, 0.6), (0.1, 0.6)])
def test_how_much_to_keep_and_the_smaller_of_equals(keep: float, scale: float) -> None:
    assert searched(by_hand((1, 1), (-1, -0.5)), keep=keep).scale == scale


def test_no_scale_keeps_the_control() -> None:
    found = searched(by_hand((1, 1), (-1, -10)))
    assert found.scale == 0.0
    assert found.edited == found.base
    assert found.kept == 1.0
    assert min(point.target for point in found.curve) == 0.5  # it was there to be had


def test_nothing_is_forgotten() -> None:
    assert searched(by_hand((1, 1), (1, 0))).scale == 0.0


def test_several_controls_are_one() -> None:
    """One control falls to 18 of 20 and another stays whole: 95 % in the mean."""
    other = task_of("other", {"val": half(1, [1.0] * 10), "test": half(1, [1.0] * 4)})
    heads = {**HEADS, "other": threshold(0, 1)}
    found = searched(by_hand((1, 1), (-1, -0.5)), TARGET, CONTROL, other, heads=heads)
    assert found.curve[3].control == pytest.approx(0.95)
    assert found.scale == 0.6
    assert found.controls == ("control", "other")
    assert found.kept == pytest.approx((5 / 8 + 1) / 2)


def test_a_control_that_the_base_cannot_do() -> None:
    with pytest.raises(RecipeError, match=r"base gets 50\.0% of the control 'control'.*class alone is 50\.0%.*choose"):
        searched(by_hand((1, 0), (-1, 0)))


def test_mistakes() -> None:
    span = by_hand((1, 1), (-1, -0.5))
    with pytest.raises(RecipeError, match=r"positive numbers, got -0\.1"):
        searched(span, grid=(-0.1,))
    for keep in (0.0, 1.1):
        with pytest.raises(RecipeError, match=r"share of the control to keep must be in \(0, 1\], got"):
            searched(span, keep=keep)
    for task in ("target", "control"):
        with pytest.raises(RecipeError, match="needs the head of 'target', which is to be forgotten, and of a control"):
            searched(span, heads={task: HEADS[task]})
    for split in ("val", "test"):
        blind = replace(CONTROL, splits={**CONTROL.splits, split: CONTROL[split].unlabelled()})
        with pytest.raises(RecipeError, match=f"{split} split of 'control' has no labels"):
            searched(span, TARGET, blind)
    with pytest.raises(RecipeError, match="there is no data of 'control'"):
        searched(span, TARGET)


def test_the_curve_is_that_of_real_merges(toy: Toy) -> None:
    result = negate(toy.experts, "bright", toy.tasks, grid=(0.3, 1.0), keep=0.6, encoding=toy.encoding)
    found, tasks = result.search, encoded(toy)
    line = span_of(arithmetic(toy.experts, {}), arithmetic(toy.experts, {"bright": -1.0}))
    heads = base_heads(line, tasks, toy.experts.heads)

    def measured(scale: float, task: str, split: Split) -> float:
        model = arithmetic(toy.experts, {"bright": 0.0 - scale})
        labels = torch.tensor(toy.tasks[task][split].labels)
        return counted(predict(heads[task], tasks.features(model, task, split).values), labels).value

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


def test_nothing_is_left_to_write_if_nothing_is_forgotten(toy: Toy) -> None:
    result = negate(toy.experts, "bright", toy.tasks, grid=(300,), keep=1.0, encoding=toy.encoding)
    assert result.search.scale == 0
    assert result.model is None


def test_heads_of_the_base_are_probes_on_its_train_features(toy: Toy) -> None:
    tasks = encoded(toy)
    span = span_of(arithmetic(toy.experts, {}), arithmetic(toy.experts, {"bright": -1.0}))
    span.at(1.0)  # wherever it was
    reader = {"where": replace(toy.experts.heads["where"], pooling="mean")}
    head = base_heads(span, tasks, reader)["where"]
    assert (head.labels, head.pooling) == (toy.tasks["where"].labels, "mean")
    train = span.features((0.0,), tasks, "where", "train", head)
    assert train.labels is not None
    assert counted(predict(head, train.values), train.labels).value > 0.9
    with pytest.raises(RecipeError, match="train split of 'where' has no labels"):
        base_heads(span, encoded(toy, tasks=without_labels(toy, "train")), reader)


def test_heads_of_the_experts(toy: Toy) -> None:
    """A probe needs no expert of its task, an expert's head does."""
    found = negate(toy.experts, "bright", toy.tasks, heads="expert", grid=(0.3,), encoding=toy.encoding).search
    base = toy.experts.base.with_heads(toy.experts.heads)
    for task, score in found.base.items():
        predicted = predict(base.head(task), encoded(toy).features(base, task, "test").values)
        assert score.value == counted(predicted, torch.tensor(toy.tasks[task]["test"].labels)).value
    more = {**toy.tasks, "other": toy.tasks["where"]}
    with pytest.raises(RecipeError, match="reads 'other' by its expert's head; give --expert other=PATH"):
        negate(toy.experts, "bright", more, heads="expert")
    found = negate(toy.experts, "bright", more, grid=(0.3,), keep=0.1, encoding=toy.encoding).search
    assert found.controls == ("where", "other")
    assert found.base["other"] == found.base["where"]


def test_what_cannot_be_negated(toy: Toy) -> None:
    with pytest.raises(RecipeError, match=r"task vector of 'other' is wanted.*did you mean 'where'"):
        negate(toy.experts, "other", {"other": toy.tasks["where"], "where": toy.tasks["where"]})
    with pytest.raises(RecipeError, match="no data of 'brigth'; give --data brigth=PATH"):
        negate(toy.experts, "brigth", toy.tasks)
    with pytest.raises(RecipeError, match=r"unknown heads 'prob'; did you mean 'probe'"):
        negate(toy.experts, "bright", toy.tasks, heads="prob")  # type: ignore[arg-type]
