"""Moving one module gives what merging again and again would, and so does the curve over scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.analysis.making import Toy
from tests.evaluation.making import encoded, without_labels

from orthomerge.api.merge import merge
from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import Progress
from orthomerge.core.schema import maker_of, schema
from orthomerge.evaluation.metrics import predict
from orthomerge.evaluation.scale import GRID, ScaleSearch, Span, arithmetic, scales, search_scale, span_of
from orthomerge.merging.methods import METHODS
from orthomerge.models.model import Model
from orthomerge.models.model_data import loaded

SCALED = [name for name, row in METHODS.items() if "scale" in schema(maker_of(row))]


class Said(Progress):
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, title: str, total: int | None) -> None:
        self.stages.append(title)


def predictions(toy: Toy, model: Model, task: str) -> torch.Tensor:
    return predict(model.head(task), encoded(toy).features(model, task, "val").values)


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
            shares = [
                float((one == other).double().mean()) for one, other in ((mine, truth), (expert, truth), (mine, expert))
            ]
            expected = shares[2] if criterion == "agreement" else shares[0] / shares[1]
            assert found.curve[scale][task] == pytest.approx(100 * expected, abs=1e-4)


@pytest.mark.parametrize("method", SCALED)
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
    rows = found.plot(width=14).splitlines()
    assert rows[1] == " 0.30  70.0 ############## <"
    assert rows[2] == " 0.10  15.0 ###"
    assert not rows[0].endswith("<")
    assert (GRID[0], GRID[-1], len(GRID)) == (0.05, 1.0, 20)


def test_agreement_needs_no_labels(toy: Toy) -> None:
    blind = without_labels(toy, "val")
    options: dict[str, Any] = {"grid": (0.2, 0.8), "encoding": toy.encoding}
    found = search_scale(toy.experts, "task_arithmetic", blind, **options)
    assert found.criterion == "agreement"  # accuracy where there are labels
    assert found == search_scale(toy.experts, "task_arithmetic", toy.tasks, criterion="agreement", **options)
    assert search_scale(toy.experts, "task_arithmetic", toy.tasks, **options).criterion == "accuracy"
    with pytest.raises(RecipeError, match="val split of 'bright' has no labels; accuracy needs them"):
        search_scale(toy.experts, "task_arithmetic", blind, criterion="accuracy", **options)


def test_mistakes(toy: Toy) -> None:
    cases: list[tuple[str, Any, Any, str]] = [
        ("average", toy.tasks, (1,), "'average' has no 'scale' to search"),
        ("ties", toy.tasks, (), "needs at least one scale; give a grid"),
        ("ties", {"wher": toy.tasks["where"]}, (1,), "data of 'wher', but no task of that name; did you mean 'where'"),
    ]
    for method, data, grid, message in cases:
        with pytest.raises(RecipeError, match=message):
            search_scale(toy.experts, method, data, grid=grid)


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
    tasks, point = encoded(toy), plane.at(0.5, 0.0)
    moved = tasks.features(point, "bright", "test", reader=head)
    torch.testing.assert_close(moved.values, tasks.features(model, "bright", "test").values)
    usual = tasks.features(point.with_heads(toy.experts.heads), "bright", "test")
    assert not torch.allclose(moved.values, usual.values, atol=1e-2)


def test_a_span_moves_no_module_that_others_use(toy: Toy) -> None:
    model = merge(toy.experts, method="average")
    before = {key: tensor.clone() for key, tensor in loaded(model.encoder).module.state_dict().items()}
    encoded(toy).features(span_of(arithmetic(toy.experts, {}), model).at(0.3).with_heads(model.heads), "where", "val")
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
