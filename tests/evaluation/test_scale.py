"""The curve over scales is that of real merges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evaluation.test_evaluate import Toy, make_toy

from orthomerge import load, merge
from orthomerge.errors import RecipeError
from orthomerge.evaluation.metrics import predict
from orthomerge.evaluation.scale import GRID, ScaleSearch, search_scale
from orthomerge.merging.methods import METHODS, method_maker
from orthomerge.strict import schema

SCALED = [name for name, row in METHODS.items() if "scale" in schema(method_maker(row))]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


def predictions(toy: Toy, out: Path, task: str, cache: Path) -> torch.Tensor:
    bench = toy.bench(cache)
    return predict(bench.head(out, task), bench.features(out, task, "val").values)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("criterion", ["accuracy", "agreement"])
def test_the_curve_is_that_of_real_merges(toy: Toy, tmp_path: Path, method: str, criterion: Any) -> None:
    grid = (0.2, 0.7, 1.3)
    said: list[str] = []
    found = search_scale(toy.recipe(method), toy.bench(tmp_path / "c"), grid=grid, criterion=criterion, say=said.append)
    assert tuple(found.curve) == grid
    assert len(said) == 3
    for scale in grid:
        out = tmp_path / str(scale)
        merge(toy.recipe(method, scale=scale), out=out)
        for task in toy.tasks:
            mine = predictions(toy, out, task, tmp_path / "c")
            expert = predictions(toy, toy.folder / "out" / task, task, tmp_path / "c")
            truth = torch.tensor(toy.tasks[task]["val"].labels)
            shares = [
                float((one == other).double().mean()) for one, other in ((mine, truth), (expert, truth), (mine, expert))
            ]
            expected = shares[2] if criterion == "agreement" else shares[0] / shares[1]
            assert found.curve[scale][task] == pytest.approx(100 * expected, abs=1e-4)


@pytest.mark.parametrize("method", SCALED)
def test_every_method_with_a_scale_multiplies_its_vector_by_it(toy: Toy, tmp_path: Path, method: str) -> None:
    states = {}
    for scale in (0.0, 0.5, 1.0):
        merge(toy.recipe(method, scale=scale), out=tmp_path / str(scale))
        states[scale] = load(tmp_path / str(scale)).encoder.state_dict()
    for key, tensor in states[0.5].items():
        torch.testing.assert_close(tensor, (states[0.0][key] + states[1.0][key]) / 2, atol=2e-6, rtol=1e-5)


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


def test_agreement_needs_no_labels(toy: Toy, tmp_path: Path) -> None:
    tasks = {
        name: replace(task, splits={split: part.unlabelled() for split, part in task.splits.items()})
        for name, task in toy.tasks.items()
    }
    bench = replace(toy.bench(tmp_path), tasks=tasks)
    recipe = toy.recipe("task_arithmetic")
    blind = search_scale(recipe, bench, grid=(0.2, 0.8), criterion="agreement")
    assert blind == search_scale(recipe, toy.bench(tmp_path), grid=(0.2, 0.8), criterion="agreement")
    with pytest.raises(RecipeError, match="val split of 'bright' has no labels; choose the scale by 'agreement'"):
        search_scale(recipe, bench, grid=(0.2,))


def test_only_val_is_looked_at(toy: Toy, tmp_path: Path) -> None:
    tasks = {name: replace(task, splits={"val": task["val"]}) for name, task in toy.tasks.items()}
    found = search_scale(toy.recipe("ties"), replace(toy.bench(tmp_path), tasks=tasks), grid=(0.5,))
    assert found.best == 0.5


def test_mistakes(toy: Toy, tmp_path: Path) -> None:
    bench = toy.bench(tmp_path)
    with pytest.raises(RecipeError, match="'average' has no 'scale' to search"):
        search_scale(toy.recipe("average"), bench)
    with pytest.raises(RecipeError, match="needs at least one scale; give a grid"):
        search_scale(toy.recipe("ties"), bench, grid=())
    with pytest.raises(RecipeError, match="expert of 'bright' is needed as teacher"):
        search_scale(toy.recipe("ties"), replace(bench, teachers={}), grid=(0.5,))
