"""The curve over scales is that of real merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.analysis.making import Toy
from tests.evaluation.making import encoded, without_labels

from orthomerge.api.merge import merge
from orthomerge.core.errors import RecipeError
from orthomerge.core.rows import maker_of
from orthomerge.core.schema import schema
from orthomerge.evaluation.metrics import predict
from orthomerge.evaluation.scale import GRID, ScaleSearch, search_scale
from orthomerge.merging.methods import METHODS
from orthomerge.models.model import Model

SCALED = [name for name, row in METHODS.items() if "scale" in schema(maker_of(row))]


class Said:
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, title: str, total: int | None) -> None:
        self.stages.append(title)

    def advance(self, count: int) -> None: ...


def predictions(toy: Toy, model: Model, task: str) -> torch.Tensor:
    return predict(model.head(task), encoded(toy).features(model, task, "val").values)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("criterion", ["accuracy", "agreement"])
def test_the_curve_is_that_of_real_merges(toy: Toy, method: str, criterion: Any) -> None:
    grid, said = (0.2, 0.7, 1.3), Said()
    found = search_scale(
        toy.experts, method, toy.tasks, grid=grid, criterion=criterion, encoding=toy.encoding, progress=said
    )
    assert tuple(found.curve) == grid
    assert [line.partition(":")[0] for line in said.stages] == [f"scale {scale:g}" for scale in grid]
    for scale in grid:
        model = merge(toy.experts, method=method, scale=scale)
        for task in toy.tasks:
            mine, expert = (predictions(toy, each, task) for each in (model, toy.experts.teacher(task)))
            truth = torch.tensor(toy.tasks[task]["val"].labels)
            shares = [
                float((one == other).double().mean()) for one, other in ((mine, truth), (expert, truth), (mine, expert))
            ]
            expected = shares[2] if criterion == "agreement" else shares[0] / shares[1]
            assert found.curve[scale][task] == pytest.approx(100 * expected, abs=1e-4)


def test_options_of_the_method_count(toy: Toy) -> None:
    def search(**options: Any) -> ScaleSearch:
        return search_scale(toy.experts, "ties", toy.tasks, options, grid=(0.7, 1.3), encoding=toy.encoding)

    assert search(density=0.9, scale="auto") == search(density=0.9)
    assert search(density=0.05) != search(density=0.9)


@pytest.mark.parametrize("method", SCALED)
def test_every_method_with_a_scale_multiplies_its_vector_by_it(toy: Toy, method: str) -> None:
    states = {}
    for scale in (0.0, 0.5, 1.0):
        states[scale] = merge(toy.experts, method=method, scale=scale).encoder.module().state_dict()
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


def test_agreement_needs_no_labels(toy: Toy) -> None:
    blind = without_labels(toy, "val")
    options: dict[str, Any] = {"grid": (0.2, 0.8), "encoding": toy.encoding}
    found = search_scale(toy.experts, "task_arithmetic", blind, **options)
    assert found.criterion == "agreement"  # accuracy where there are labels
    assert found == search_scale(toy.experts, "task_arithmetic", toy.tasks, criterion="agreement", **options)
    assert search_scale(toy.experts, "task_arithmetic", toy.tasks, **options).criterion == "accuracy"
    with pytest.raises(RecipeError, match="val split of 'bright' has no labels; choose the scale by 'agreement'"):
        search_scale(toy.experts, "task_arithmetic", blind, criterion="accuracy", **options)


def test_mistakes(toy: Toy) -> None:
    with pytest.raises(RecipeError, match="'average' has no 'scale' to search"):
        search_scale(toy.experts, "average", toy.tasks)
    with pytest.raises(RecipeError, match="needs at least one scale; give a grid"):
        search_scale(toy.experts, "ties", toy.tasks, grid=(), encoding=toy.encoding)
    with pytest.raises(RecipeError, match="there is data of 'wher', but no task of that name; did you mean 'where'"):
        search_scale(toy.experts, "ties", {"wher": toy.tasks["where"]})
