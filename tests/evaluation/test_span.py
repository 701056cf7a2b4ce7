"""Moving one encoder gives what merging again and again would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.evaluation.test_evaluate import Toy, make_toy

from orthomerge import load, merge
from orthomerge.errors import RecipeError
from orthomerge.evaluation.span import ORIGIN, Span, arithmetic, labelled, scales, score, span_of
from orthomerge.recipe import Align


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def plane(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Span:
    recipe = toy.recipe("ties")
    ends = (arithmetic(recipe, {task: 1.0}) for task in toy.tasks)
    return span_of(tmp_path_factory.mktemp("span"), arithmetic(recipe, {}), *ends)


def test_every_point_is_a_merge(toy: Toy, plane: Span, tmp_path: Path) -> None:
    for bright, where in ((0.0, 0.0), (0.3, -0.7), (1.0, 1.0)):
        merge(arithmetic(toy.recipe("average"), {"bright": bright, "where": where}), out=tmp_path / f"{bright}{where}")
        merged = load(tmp_path / f"{bright}{where}").encoder.state_dict()
        moved = plane.at(bright, where).encoder.state_dict()
        assert moved.keys() == merged.keys()
        for key, tensor in moved.items():
            torch.testing.assert_close(tensor, merged[key], atol=2e-6, rtol=1e-5)


def test_the_origin_keeps_the_heads_in_its_folder(toy: Toy, tmp_path: Path) -> None:
    origin = arithmetic(toy.recipe("ties"), {})
    span_of(tmp_path, origin)
    assert load(tmp_path / ORIGIN).heads.keys() == toy.tasks.keys()


def test_small_directions_survive_sixteen_bits(toy: Toy, plane: Span, tmp_path: Path) -> None:
    recipe = replace(arithmetic(toy.recipe("ties"), {}), dtype="bfloat16")
    line = span_of(tmp_path, recipe, arithmetic(recipe, {"bright": 1e-3}))
    for key, tensor in line.directions[0].items():
        torch.testing.assert_close(tensor, 1e-3 * plane.directions[0][key], atol=1e-6, rtol=0)


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
    assert all(tensor.equal(plane.origin[key]) for key, tensor in drawn.at(0.0, 0.0).encoder.state_dict().items())


def test_a_coefficient_for_each_direction(plane: Span) -> None:
    with pytest.raises(ValueError, match="zip"):
        plane.at(1.0)


def test_the_recipe_of_a_sum(toy: Toy) -> None:
    given = replace(toy.recipe("ties", density=0.5), vector="bright - where", align=Align({"where": "where.csv"}))
    recipe = arithmetic(given, {"where": -0.5})
    assert (recipe.vector, recipe.align) == (None, None)
    assert (recipe.method, recipe.parameters) == ("task_arithmetic", {"scale": {"bright": 0.0, "where": -0.5}})
    with pytest.raises(RecipeError, match=r"task vector of 'brigth' is wanted.*did you mean 'bright'"):
        arithmetic(recipe, {"brigth": 1.0})


def test_a_grid() -> None:
    assert scales((1, 0.2, 0.2)) == (0.0, 0.2, 1.0)
    with pytest.raises(RecipeError, match="needs at least one scale"):
        scales(())
    for wrong in (0, -0.1, float("nan"), float("inf"), True, "x"):
        with pytest.raises(RecipeError, match=r"a grid must hold positive numbers, got .*; 0 is tried in any case"):
            scales((0.5, wrong))  # type: ignore[arg-type]


def test_an_accuracy_is_counted_with_its_interval(toy: Toy, plane: Span, tmp_path: Path) -> None:
    bench = toy.bench(tmp_path)
    head = bench.head(toy.folder / "out" / "sum", "bright")
    found = score(bench, plane.at(1.0, 0.0), head, "bright", "test")
    assert found.value > 0.8
    assert found.low < found.value < found.high
    assert found.examples == len(toy.tasks["bright"]["test"])


def test_data_and_labels_that_are_missing(toy: Toy, tmp_path: Path) -> None:
    task = toy.tasks["where"]
    blind = replace(task, splits={**task.splits, "val": task["val"].unlabelled()})
    bench = replace(toy.bench(tmp_path), tasks={"where": blind})
    assert len(labelled(bench, "where", "test")[1]) == len(task["test"])
    with pytest.raises(RecipeError, match="val split of 'where' has no labels; accuracy needs them"):
        labelled(bench, "where", "val")
    with pytest.raises(RecipeError, match="no data of 'wher'; did you mean 'where'"):
        labelled(bench, "wher", "val")
