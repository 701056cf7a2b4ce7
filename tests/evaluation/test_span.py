"""Moving one module gives what merging again and again would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.analysis.making import Toy
from tests.evaluation.making import encoded

from orthomerge.api.merge import merge
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.span import Span, arithmetic, scales, span_of
from orthomerge.models.modules import loaded


@pytest.fixture(scope="module")
def plane(toy: Toy) -> Span:
    return span_of(arithmetic(toy.experts, {}), *(arithmetic(toy.experts, {task: 1.0}) for task in toy.tasks))


def test_every_point_is_a_merge(toy: Toy, plane: Span) -> None:
    for bright, where in ((0.0, 0.0), (0.3, -0.7), (1.0, 1.0)):
        merged = arithmetic(toy.experts, {"bright": bright, "where": where}).encoder.module().state_dict()
        moved = plane.at(bright, where).state_dict()
        assert moved.keys() == merged.keys()
        for key, tensor in moved.items():
            torch.testing.assert_close(tensor, merged[key], atol=2e-6, rtol=1e-5)


def test_features_of_a_point_are_those_of_the_merge(toy: Toy, plane: Span) -> None:
    """Each head reads the encoder in its own way."""
    head = replace(toy.experts.heads["bright"], pooling="mean")
    model = arithmetic(toy.experts, {"bright": 0.5}).with_heads({"bright": head})
    moved = plane.features((0.5, 0.0), encoded(toy), "bright", "test", head)
    torch.testing.assert_close(moved.values, encoded(toy).features(model, "bright", "test").values)
    usual = plane.features((0.5, 0.0), encoded(toy), "bright", "test", toy.experts.heads["bright"])
    assert not torch.allclose(moved.values, usual.values, atol=1e-2)


def test_a_span_moves_no_module_that_others_use(toy: Toy) -> None:
    model = merge(toy.experts, method="average")
    before = {key: tensor.clone() for key, tensor in loaded(model.encoder).module.state_dict().items()}
    span_of(arithmetic(toy.experts, {}), model).at(0.3)
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
    state = drawn.at(0.0, 0.0).state_dict()
    assert all(tensor.equal(plane.origin[name]) for name, tensor in state.items())


def test_a_sum_of_task_vectors(toy: Toy) -> None:
    model = arithmetic(toy.experts, {"where": -0.5})
    assert model.origin.facts["method"] == {"name": "task_arithmetic", "parameters": {"scale": [0.0, -0.5]}}
    assert model.tasks == tuple(toy.tasks)
    with pytest.raises(RecipeError, match=r"task vector of 'brigth' is wanted.*did you mean 'bright'"):
        arithmetic(toy.experts, {"brigth": 1.0})


def test_a_grid() -> None:
    assert scales((1, 0.2, 0.2)) == (0.0, 0.2, 1.0)
    with pytest.raises(RecipeError, match="needs at least one scale"):
        scales(())
    for wrong in (0, -0.1, float("nan"), float("inf"), True, "x"):
        with pytest.raises(RecipeError, match=r"a grid must hold positive numbers, got .*; 0 is tried in any case"):
            scales((0.5, wrong))  # type: ignore[arg-type]
